// This file owns which GPU of its machine a rank takes.

package launcher

import (
	"fmt"
	"strings"
)

// GPU returns the number of the GPU that this rank takes among those that the driver shows,
// which are those of CUDA_VISIBLE_DEVICES: the one with the rank's number on its machine. If
// CUDA_VISIBLE_DEVICES names a single GPU the rank takes that one, because launchers choose
// a GPU for each rank like that.
func (p *Place) GPU(getenv func(string) string, visible int) (int, error) {
	named := strings.TrimSpace(getenv("CUDA_VISIBLE_DEVICES"))
	switch {
	case visible == 1 && named != "" && !strings.Contains(named, ","):
		return 0, nil
	case !p.LocalKnown:
		return 0, fmt.Errorf("rank %d on %s does not know its place on the machine; set LOCAL_RANK and LOCAL_WORLD_SIZE, or CUDA_VISIBLE_DEVICES to one GPU", p.Rank, p.Host)
	case p.LocalRank < visible:
		return p.LocalRank, nil
	}
	return 0, fmt.Errorf("rank %d is number %d of %d on %s, which shows %d; start at most one rank for each GPU, or set CUDA_VISIBLE_DEVICES to one GPU for each rank",
		p.Rank, p.LocalRank, p.LocalSize, p.Host, visible)
}
