"""Every option that more than one place reads, declared once: default, help, choices and range. No torch in here."""
