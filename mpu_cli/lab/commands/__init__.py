"""The laboratory's commands, a module each, and the one table by which they join the command line."""

from mpu_cli.lab.commands.audit import Audit
from mpu_cli.lab.commands.audit_delta import AuditDelta
from mpu_cli.lab.commands.compare import Compare
from mpu_cli.lab.commands.finetune import Finetune
from mpu_cli.lab.commands.rehearse import Rehearse
from mpu_cli.lab.commands.report import Report
from mpu_cli.lab.commands.run import Run
from mpu_cli.lab.commands.surrogate import Surrogate
from mpu_cli.lab.commands.sweep import Sweep
from mpu_cli.lab.commands.trace import Trace
from mpu_cli.lab.commands.tune import Tune
from mpu_cli.options.command import Command

# By the headings of help.
PANELS: dict[str, tuple[type[Command], ...]] = {
    "Server: owns the model": (Rehearse, Trace),
    "Client: owns the records": (Surrogate,),
    "Both": (Compare,),
    "If something is odd": (Audit, AuditDelta, Tune),
    "Experiments: both parties on one machine": (Run, Sweep, Report, Finetune),
}
