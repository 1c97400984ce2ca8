"""What jobkit is told of the device. The submitting side reads it, so it imports no torch."""

from jobkit.run.device_kinds import DeviceKind

KIND = DeviceKind(
    name="standin",
    backend="standin_ccl",
    visible="STANDIN_VISIBLE_DEVICES",
    gres="standin",
    package="torch_standin",
    autocast=(),
)
