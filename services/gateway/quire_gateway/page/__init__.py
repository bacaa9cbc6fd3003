"""A web page that shows the cluster as it works: read-only, for operators, closed unless it has an address."""

from quire_gateway.page.frontend import PageFrontend

__all__ = ["PageFrontend"]
