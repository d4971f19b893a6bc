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

// TestTableOfPairs writes down what becomes of two launchers that both say something: of the same rank and the same number
// of ranks, of another rank, and of another number.
func TestTableOfPairs(t *testing.T) {
	said := func(rank, size int) []string {
		return []string{
			fmt.Sprintf("RANK=%d WORLD_SIZE=%d LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=torch MASTER_PORT=4000 TORCHELASTIC_RUN_ID=t", rank, size),
			fmt.Sprintf("RANK=%d WORLD_SIZE=%d MASTER_ADDR=hand MASTER_PORT=4001", rank, size),
			fmt.Sprintf("OMPI_COMM_WORLD_RANK=%d OMPI_COMM_WORLD_SIZE=%d OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1", rank, size),
			fmt.Sprintf("PMI_RANK=%d PMI_SIZE=%d", rank, size),
			fmt.Sprintf("SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=%d SLURM_NTASKS=%d SLURM_LOCALID=0 SLURM_JOB_NODELIST=n[1-9]", rank, size),
			fmt.Sprintf("LWS_LEADER_ADDRESS=a-0.a LWS_GROUP_SIZE=%d LWS_WORKER_INDEX=%d", size, rank),
			fmt.Sprintf("JOB_COMPLETION_INDEX=%d", rank),
		}
	}
	var b strings.Builder
	for i, first := range said(1, 3) {
		for _, other := range [][2]int{{1, 3}, {2, 3}, {1, 4}} {
			for j, second := range said(other[0], other[1]) {
				if j <= i || i == 0 && j != 2 { // torchrun knows all, whoever started it
					continue
				}
				p, err := Find(vars(first + " " + second))
				if p != nil {
					p.Host = ""
				}
				fmt.Fprintf(&b, "%s\n  %s\n", first, second)
				if err != nil {
					fmt.Fprintf(&b, "    %v\n", err)
				} else {
					fmt.Fprintf(&b, "    %+v\n", *p)
				}
			}
		}
	}
	golden.Check(t, "pairs.txt", b.String())
}
