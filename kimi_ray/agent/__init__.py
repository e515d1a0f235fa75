"""One agent: the services of the Agent scope around one log.

``Journal`` (log, fold, durability), ``Prompts`` (the queue), ``TurnLoop`` with ``Requester`` and ``ToolRuns``,
``LimitMeter``; ``LiveAgent`` ties them together, ``specs`` are the words in which others speak to it. What may enter:
what an agent does in its turn. What may not: where it lives, and who else there is.
"""
