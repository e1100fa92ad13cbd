"""Rounds between organisations over Flower: a courier on each side carries files, and ``mpu`` does the work."""
