"""What the actors hold: plain async cores and the ports between them. No Ray.

``AgentHost`` holds Agent scopes, ``SessionHost`` Session scopes and their swarms, ``Registry`` knows who lives where,
``StoreHost`` owns the store. ``LocalCluster`` wires them in one process; ``kimi_ray.actors`` wraps each in a Ray
actor. What may enter: placement, activation, admission, and the words of the calls. What an agent does in its turn is
``kimi_ray.agent``'s.
"""
