"""The only room that imports Ray: the cores of ``kimi_ray.hosts`` as named, detached actors.

``connect`` joins or starts a runtime; ``RayCluster`` is the ``Cluster`` port on Ray; ``shells`` are the actor classes;
``calls`` has the one function that awaits a reference. What may enter: what only Ray makes necessary. Ray itself is
imported inside functions, so that reading commands and the in-process cluster never pay for it.
"""

from kimi_ray.actors.connect import connect
from kimi_ray.actors.operate import down, drain, host_logs, status

__all__ = ["connect", "down", "drain", "host_logs", "status"]
