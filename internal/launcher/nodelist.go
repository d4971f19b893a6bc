// This file owns Slurm's lists: hosts such as "gpu[01-04,7],login", and tasks such as
// "4(x3),2".

package launcher

import (
	"fmt"
	"strconv"
	"strings"
)

// firstHost returns the first host of a list: "gpu01" for "gpu[01-04,7],login". A name can
// have several brackets.
func firstHost(list string) (string, error) {
	bad := fmt.Errorf("expected a list of hosts such as gpu[01-04],login in SLURM_JOB_NODELIST, got %q; set MASTER_ADDR to the host of rank 0", list)
	var host strings.Builder
	for rest := list; rest != ""; {
		plain := strings.IndexAny(rest, "[],")
		if plain < 0 {
			host.WriteString(rest)
			break
		}
		host.WriteString(rest[:plain])
		if rest[plain] == ',' {
			break
		}
		inside, after, closed := strings.Cut(rest[plain+1:], "]")
		low := inside
		if end := strings.IndexAny(inside, "-,"); end >= 0 {
			low = inside[:end]
		}
		if rest[plain] == ']' || !closed || low == "" || strings.Trim(low, "0123456789") != "" {
			return "", bad
		}
		host.WriteString(low)
		rest = after
	}
	if strings.TrimSpace(host.String()) == "" {
		return "", bad
	}
	return host.String(), nil
}

// tasksOfNode returns the tasks of the node with an index: 2 for index 3 of "4(x3),2".
func tasksOfNode(list string, node int) (int, error) {
	bad := fmt.Errorf("expected the tasks of node %d in a list such as 4(x3),2 in SLURM_STEP_TASKS_PER_NODE or SLURM_TASKS_PER_NODE, got %q; start with srun, which sets it", node, list)
	for part := range strings.SplitSeq(list, ",") {
		tasks, times, repeated := strings.Cut(part, "(x")
		n, err := strconv.Atoi(tasks)
		if err != nil || n < 1 {
			return 0, bad
		}
		nodes := 1
		if repeated {
			if nodes, err = strconv.Atoi(strings.TrimSuffix(times, ")")); err != nil || nodes < 1 {
				return 0, bad
			}
		}
		if node < nodes {
			return n, nil
		}
		node -= nodes
	}
	return 0, bad
}
