"""``python -m mpu_cli`` is the ``mpu`` command."""

from mpu_cli.cli.main import main

main()
