// This file owns the limits that a shell sets on the memory of a process. The kernel
// refuses memory beyond them, however much the machine has.

package sysinfo

import (
	"cmp"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// Rlimit is a limit on the memory of this process.
type Rlimit struct {
	Command string // the command of a shell that sets it
	Limit   memory.Bytes
	Used    memory.Bytes // 0 if it is not known
}

// String says what the process may map, what it has mapped, and where the limit is from.
func (l Rlimit) String() string {
	has := ""
	if l.Used > 0 {
		has = fmt.Sprintf(" and has mapped %v", l.Used)
	}
	return fmt.Sprintf("this process may map %v of memory (%s)%s", l.Limit, l.Command, has)
}

// Rlimits returns the limits on the memory of this process, the one with the least room
// first. It returns nil if there are none.
func Rlimits() []Rlimit { return readRlimits(os.DirFS("/"), rlimits()) }

func readRlimits(root fs.FS, set []column) (out []Rlimit) {
	// In pages: all addresses, resident, shared, code, library, data and stack.
	used := strings.Fields(text(root, "proc/self", "statm"))
	for _, l := range set {
		if l.column < len(used) {
			n, _ := strconv.ParseInt(used[l.column], 10, 64)
			l.Used = memory.Bytes(n * pageBytes)
		}
		out = append(out, l.Rlimit)
	}
	slices.SortStableFunc(out, func(a, b Rlimit) int { return cmp.Compare(a.Limit-a.Used, b.Limit-b.Used) })
	return out
}

// column is a limit and the column of statm that counts towards it.
type column struct {
	Rlimit
	column int
}
