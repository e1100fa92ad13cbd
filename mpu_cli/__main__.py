"""``python -m mpu_cli`` is the ``mpu`` command."""

from mpu_cli.entry import main

main()
