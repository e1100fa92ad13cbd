"""Where what another party sends is taken in, and what goes out is cleaned: files, folders, archives, JSON, time."""
