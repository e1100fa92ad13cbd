"""What this machine offers, and whether mpu works on it."""
