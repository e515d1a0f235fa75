"""One agent: the services of the Agent scope around one log.

``Journal`` (log, fold, durability), ``Prompts`` (the queue) behind ``PromptGates``, ``TurnLoop`` with ``Requester`` and
``ToolRuns``, ``LimitMeter``; ``AgentSlots`` is where others have a say in all of it, ``Notices`` tells those who have
none; ``LiveAgent`` ties them together, ``specs`` are the words in which others speak to it. What may enter: what an
agent does in its turn. What may not: where it lives, and who else there is.
"""
