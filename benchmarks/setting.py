"""The case of a comparison: the same for all contenders."""

from typing import NamedTuple


class Setting(NamedTuple):
    """Sizes and times."""
    P: int  # pipeline ranks
    D: int  # replicas
    M: int  # micro-batches of a step
    layers: int
    forward_s: float  # of a layer; a backward takes twice as long
    activation_bytes: int  # of a micro-batch at every boundary
    parameter_bytes: int  # of a pipeline rank

    @property
    def features(self) -> int:
        return self.activation_bytes // 4

    @property
    def weights(self) -> int:
        """Of a layer."""
        return self.parameter_bytes * self.P // self.layers // 4

    @property
    def compute_s(self) -> float:
        """Of a rank in a step."""
        return 3 * self.forward_s * self.M * self.layers / self.P
