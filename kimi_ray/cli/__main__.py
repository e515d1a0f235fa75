"""``python -m kimi_ray.cli``: the command without its console script."""

from kimi_ray.cli.app import main

main()
