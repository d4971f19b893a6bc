// This file owns the limit of connections. Viewers share the process with a run, which
// needs file descriptors for checkpoints and traces: a flood of connections must not take
// them.

package live

// A server holds mostConnections, but no more than a quarter of the descriptors that the
// process may open, and fewConnections at least.
const mostConnections, fewConnections = 128, 4

// connections returns the limit of connections for a process that may open some files; 0
// stands for no limit.
func connections(files uint64) int {
	if files == 0 || files/4 > mostConnections {
		return mostConnections
	}
	return max(int(files/4), fewConnections)
}
