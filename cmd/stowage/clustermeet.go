// This file owns what the processes of a cluster tell each other of themselves when they meet.

package main

// hello is what a process tells the others of itself when they meet.
type hello struct {
	Run       string // names what the processes do, if it is rank 0
	Host      string
	Cores     string // on which it may run
	Processes string // the numbers of those with the same mean the same; empty if that is not known
	ID        int    // its number among them
}

// beside counts the processes that share the cores of this one, itself included, and returns the numbers
// by rank of those that have one here.
func (h hello) beside(all []hello) (cores int, near map[int]int) {
	near = map[int]int{}
	for rank, x := range all {
		if x.Host == h.Host && x.Cores == h.Cores {
			cores++
		}
		if x.Host == h.Host && x.Processes == h.Processes && h.Processes != "" {
			near[rank] = x.ID
		}
	}
	return cores, near
}
