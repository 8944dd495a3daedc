"""Who trains where: hosts of clients in this process or as Ray actors, and the tree that adds their models."""
