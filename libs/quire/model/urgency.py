"""When the consumer of a delivery needs its layers, and how the delivery ranks among others of its tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.model.errors import InvalidRequest

_US_MAX: Final = (1 << 32) - 1
PRIORITY_MAX: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Urgency:
    """States when layers are needed: layer i at first_layer_us + i · compute_window_us from the request on.

    Args:
        compute_window_us: Time for which the consumer computes each layer (c_i of ObjectCache, §3.6), microseconds; 0
            for unknown.
        first_layer_us: Time until the first layer is needed, microseconds; 0 for at once. Without a window all layers
            are needed then.
        priority: -10 to 10. Deliveries of a tenant with a higher one get their rates first, and are begun first.

    Raises:
        InvalidRequest: A value is out of its range.
    """

    compute_window_us: int = 0
    first_layer_us: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        for name in ("compute_window_us", "first_layer_us"):
            value = getattr(self, name)
            if not 0 <= value <= _US_MAX:
                raise InvalidRequest(f"{value} is negative, or too long", field=name)
        if not -PRIORITY_MAX <= self.priority <= PRIORITY_MAX:
            raise InvalidRequest(f"{self.priority} is not in -{PRIORITY_MAX}..{PRIORITY_MAX}", field="priority")

    @property
    def is_known(self) -> bool:
        """Whether it says when layers are needed."""
        return bool(self.compute_window_us or self.first_layer_us)

    def needed_s(self, layer: int) -> float:
        """Return the time from the request until a layer is needed, seconds."""
        return (self.first_layer_us + layer * self.compute_window_us) / 1e6

    def layer_us(self, layers: int) -> int:
        """Return the time that each of `layers` may take so that none comes late, microseconds; 0 for unknown.

        A first layer that is needed within a window, or at once, is waited for, whatever the rate: then it is the
        window. One that is needed later leaves its time to all layers.
        """
        if self.first_layer_us <= self.compute_window_us:
            return self.compute_window_us
        return (self.first_layer_us + (layers - 1) * self.compute_window_us) // layers
