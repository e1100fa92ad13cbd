"""``mpu demo``."""


def demo() -> None:
    """x"""
