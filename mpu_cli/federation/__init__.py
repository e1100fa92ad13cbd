"""Rounds between organisations over Flower: a Flower app on each side carries files, and ``mpu`` does the work."""
