// This file owns the table of places: the variables of each launcher with one of them unset or
// changed. Write it anew with -update if a change is meant.

package launcher

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

func TestTableOfPlaces(t *testing.T) {
	var b strings.Builder
	for _, set := range []string{
		srunVars, batchVars + " SLURM_STEP_ID=0", torchVars, ompiVars, pmiVars, srunVars + " PMIX_RANK=3 PMIX_NAMESPACE=n",
		"PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=m PET_MASTER_PORT=29400",
		"RANK=1 WORLD_SIZE=3 MASTER_ADDR=::1 MASTER_PORT=4000 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2",
		"LWS_LEADER_ADDRESS=a-0.a LWS_GROUP_SIZE=4 LWS_WORKER_INDEX=3",
		"JOB_COMPLETION_INDEX=1 WORLD_SIZE=4 MASTER_ADDR=j-0.j MASTER_PORT=9",
	} {
		fmt.Fprintf(&b, "%s\n", set)
		list := strings.Fields(set)
		for i := range list {
			name, was, _ := strings.Cut(list[i], "=")
			for _, value := range []string{"", "0", "2", "5", "65536", "2147483648", "x"} {
				if value == was {
					continue
				}
				changed := slices.Clone(list)
				changed[i] = name + "=" + value
				p, err := Find(vars(strings.Join(changed, " ")))
				switch {
				case err != nil:
					fmt.Fprintf(&b, "  %s: %v\n", changed[i], err)
				case p == nil:
					fmt.Fprintf(&b, "  %s: nobody\n", changed[i])
				default:
					p.Host = ""
					fmt.Fprintf(&b, "  %s: %+v\n", changed[i], *p)
				}
			}
		}
	}
	golden.Check(t, "places.txt", b.String())
}
