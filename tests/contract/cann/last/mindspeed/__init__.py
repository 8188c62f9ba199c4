"""In the place of MindSpeed, which is in no package index; behind it on the path, so that a real one is taken."""
