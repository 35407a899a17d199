"""How fast a recipe trains on this machine, how near that is to its limit, and beside others."""
