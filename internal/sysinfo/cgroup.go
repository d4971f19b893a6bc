// This file owns the limits of control groups, version 1 and 2. A process sits
// in one group per hierarchy; each group on the way up to the root may carry a
// limit, and the tightest one counts.

package sysinfo

import (
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// unlimited is the least value that version 1 writes for "no limit": 2^63
// rounded down to a page, whose size may be up to 64 KiB.
const unlimited = 1<<63 - 1<<16

// readCgroups fills in the limits. On a machine that mounts both versions a
// controller lives in one of them only, so both are read and the tighter wins.
func readCgroups(root fs.FS, m *Machine) {
	mounts := cgroupMounts(root)
	for _, line := range lines(root, "proc/self/cgroup") {
		// "4:memory:/a/b" in version 1, "0::/a/b" in version 2.
		parts := strings.SplitN(line, ":", 3)
		if len(parts) != 3 {
			continue
		}
		if parts[0] == "0" && parts[1] == "" {
			for _, dir := range mounts.dirs("", parts[2]) {
				m.limitMemory("v2", readGroup(root, dir, "memory.max", "memory.current", "inactive_file"))
				m.limitCPU(quotaV2(text(root, dir, "cpu.max")))
			}
			continue
		}
		for controller := range strings.SplitSeq(parts[1], ",") {
			for _, dir := range mounts.dirs(controller, parts[2]) {
				switch controller {
				case "memory":
					m.limitMemory("v1", readGroup(root, dir, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
				case "cpu":
					m.limitCPU(quota(text(root, dir, "cpu.cfs_quota_us"), text(root, dir, "cpu.cfs_period_us")))
				}
			}
		}
	}
}

// group is the memory of one control group.
type group struct {
	limit, used memory.Bytes
}

// readGroup reads one group. Page cache that nobody used lately is given up
// before the limit bites, so it does not count as used.
func readGroup(root fs.FS, dir, limit, usage, reclaimable string) (g group) {
	n, err := strconv.ParseInt(text(root, dir, limit), 10, 64)
	if err != nil || n <= 0 || n >= unlimited {
		return group{}
	}
	g.limit = memory.Bytes(n)
	if n, err := strconv.ParseInt(text(root, dir, usage), 10, 64); err == nil {
		g.used = max(0, memory.Bytes(n))
	}
	for _, line := range lines(root, path.Join(dir, "memory.stat")) {
		key, value, _ := strings.Cut(line, " ")
		if key != reclaimable {
			continue
		}
		if n, err := strconv.ParseInt(value, 10, 64); err == nil {
			g.used -= min(max(0, memory.Bytes(n)), g.used)
		}
	}
	return g
}

func (m *Machine) limitMemory(version string, g group) {
	if g.limit == 0 {
		return
	}
	headroom := max(0, g.limit-g.used)
	if m.Memory.Limit == 0 {
		m.Memory.Limit, m.Memory.Headroom, m.Memory.Cgroup = g.limit, headroom, version
		return
	}
	if g.limit < m.Memory.Limit {
		m.Memory.Limit, m.Memory.Cgroup = g.limit, version
	}
	// The group with the least room is not always the one with the least limit.
	m.Memory.Headroom = min(m.Memory.Headroom, headroom)
}

func (m *Machine) limitCPU(threads float64) {
	if threads > 0 && (m.CPU.Quota == 0 || threads < m.CPU.Quota) {
		m.CPU.Quota = threads
	}
}

// quota returns the processor time that a group grants, in threads: granted
// microseconds over those of a period.
func quota(granted, period string) float64 {
	g, err := strconv.ParseInt(granted, 10, 64)
	if err != nil || g <= 0 {
		return 0 // "-1" in version 1 and "max" in version 2 stand for no quota
	}
	p, err := strconv.ParseInt(period, 10, 64)
	if err != nil || p <= 0 {
		return 0
	}
	return float64(g) / float64(p)
}

// quotaV2 reads "50000 100000" or "max 100000".
func quotaV2(s string) float64 {
	granted, period, _ := strings.Cut(s, " ")
	return quota(granted, period)
}

// mountTable finds where the hierarchies are mounted.
type mountTable []mount

type mount struct {
	root        string // the group that the mount shows as its top
	point       string // without the leading slash, as io/fs wants it
	controllers string // "" for version 2
}

// cgroupMounts reads lines such as
//
//	35 31 0:32 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
func cgroupMounts(root fs.FS) (t mountTable) {
	for _, line := range lines(root, "proc/self/mountinfo") {
		before, after, ok := strings.Cut(line, " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		m := mount{root: left[3], point: strings.TrimPrefix(left[4], "/")}
		switch right[0] {
		case "cgroup":
			m.controllers = right[2]
		case "cgroup2":
		default:
			continue
		}
		t = append(t, m)
	}
	return t
}

// dirs lists the folders of a group and of all groups around it, innermost
// first. A container may see only a part of the tree: what lies above the
// mount's top cannot be read, and a group outside of it is taken for the top.
func (t mountTable) dirs(controller, group string) (dirs []string) {
	for _, m := range t {
		if !m.has(controller) {
			continue
		}
		rel, inside := strings.CutPrefix(group, strings.TrimSuffix(m.root, "/")+"/")
		if !inside {
			rel = ""
		}
		for rel = path.Clean("/" + rel); ; rel = path.Dir(rel) {
			dirs = append(dirs, strings.TrimPrefix(path.Join(m.point, rel), "/"))
			if rel == "/" {
				break
			}
		}
	}
	return dirs
}

func (m mount) has(controller string) bool {
	if controller == "" {
		return m.controllers == ""
	}
	for c := range strings.SplitSeq(m.controllers, ",") {
		if c == controller {
			return true
		}
	}
	return false
}

// text returns the content of a small file without the end of the line.
func text(root fs.FS, dir, name string) string {
	b, err := fs.ReadFile(root, path.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func lines(root fs.FS, name string) []string {
	b, err := fs.ReadFile(root, name)
	if err != nil {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}
