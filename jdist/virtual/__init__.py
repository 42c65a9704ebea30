"""Virtual replicas: the program of one replica of V, run by N devices."""
