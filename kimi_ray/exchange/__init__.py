"""Logs of other programs, read into ours.

One package for each foreign format. It reads the foreign artifacts without ever changing them, says what it found in
its own terms, and turns whole sessions into logs and documents of a home through the ``Store`` seam. What may enter:
readers, conversions, writers of foreign formats. What may not: anything that the runtime needs to run.
"""
