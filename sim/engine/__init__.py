"""One simulated engine under a SimPy clock: arrivals, steps, measurements, and the replay of a trace."""
