// This file tests the reading of machines that are shown as files.

package sysinfo

import (
	"io/fs"
	"runtime"
	"testing"
	"testing/fstest"

	"github.com/stowage-dev/stowage/memory"
)

const (
	gib     = int64(memory.GiB)
	meminfo = "MemTotal:       65536 kB\nMemFree:   1 kB\nMemAvailable:   32768 kB\n"
	cpuinfo = "processor\t: 0\nmodel name\t: Test CPU @ 2:1 GHz\nprocessor\t: 1\nmodel name\t: other\n"
)

// machine makes a file system from paths and contents.
func machine(files map[string]string) fs.FS {
	m := fstest.MapFS{
		"proc/meminfo": {Data: []byte(meminfo)},
		"proc/cpuinfo": {Data: []byte(cpuinfo)},
	}
	for name, content := range files {
		m[name] = &fstest.MapFile{Data: []byte(content)}
	}
	return m
}

func TestPlainMachine(t *testing.T) {
	m := ReadFrom(machine(nil))
	if m.CPU.Model != "Test CPU @ 2:1 GHz" {
		t.Errorf("model %q", m.CPU.Model)
	}
	want := Memory{Total: 64 * memory.MiB, Available: 32 * memory.MiB}
	if m.Memory != want {
		t.Errorf("memory %+v, want %+v", m.Memory, want)
	}
	if got := m.Memory.Usable(); got != 32*memory.MiB {
		t.Errorf("usable %v", got)
	}
}

func TestEmptyMachine(t *testing.T) {
	m := ReadFrom(fstest.MapFS{})
	if m.Memory != (Memory{}) || m.CPU.Quota != 0 || m.CPU.Model != "" {
		t.Errorf("no files, yet %+v", m)
	}
}

// The cases are the shapes that control groups have in the wild: the host, a
// container with and without a namespace of its own, and both versions at once.
func TestCgroupLimits(t *testing.T) {
	const (
		v1mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
			"36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
		v2mount = "41 31 0:38 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
	)
	for _, c := range []struct {
		name  string
		files map[string]string
		want  Memory
		quota float64
	}{{
		name: "v2, the parent is tighter",
		files: map[string]string{
			"proc/self/mountinfo":                    v2mount,
			"proc/self/cgroup":                       "0::/job/step\n",
			"sys/fs/cgroup/job/step/memory.max":      "8388608\n",
			"sys/fs/cgroup/job/step/memory.current":  "1048576\n",
			"sys/fs/cgroup/job/step/cpu.max":         "max 100000\n",
			"sys/fs/cgroup/job/memory.max":           "4194304\n",
			"sys/fs/cgroup/job/memory.current":       "3145728\n",
			"sys/fs/cgroup/job/memory.stat":          "anon 5\ninactive_file 1048576\nactive_file 7\n",
			"sys/fs/cgroup/job/cpu.max":              "150000 100000\n",
			"sys/fs/cgroup/memory.max":               "max\n",
			"sys/fs/cgroup/elsewhere/job/memory.max": "1\n",
		},
		want:  Memory{Limit: 4 * memory.MiB, Headroom: 2 * memory.MiB, Cgroup: "v2"},
		quota: 1.5,
	}, {
		name: "v2, the looser group is fuller",
		files: map[string]string{
			"proc/self/mountinfo":              v2mount,
			"proc/self/cgroup":                 "0::/a/b",
			"sys/fs/cgroup/a/b/memory.max":     "4194304",
			"sys/fs/cgroup/a/b/memory.current": "0",
			"sys/fs/cgroup/a/memory.max":       "8388608",
			"sys/fs/cgroup/a/memory.current":   "8388608",
		},
		want: Memory{Limit: 4 * memory.MiB, Headroom: 0, Cgroup: "v2"},
	}, {
		name: "v1",
		files: map[string]string{
			"proc/self/mountinfo": v1mounts,
			"proc/self/cgroup":    "4:memory:/jobs/7\n3:cpu,cpuacct:/jobs/7\n0::/\n",
			"sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes":  "2097152\n",
			"sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes":  "1048576\n",
			"sys/fs/cgroup/memory/jobs/7/memory.stat":            "inactive_file 1\ntotal_inactive_file 524288\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":         "9223372036854771712\n",
			"sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_quota_us":  "-1\n",
			"sys/fs/cgroup/cpu,cpuacct/jobs/7/cpu.cfs_period_us": "100000\n",
			"sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us":    "50000\n",
			"sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us":   "100000\n",
		},
		want:  Memory{Limit: 2 * memory.MiB, Headroom: 1536 * memory.KiB, Cgroup: "v1"},
		quota: 0.5,
	}, {
		name: "v1 with 64 KiB pages, unlimited",
		files: map[string]string{
			"proc/self/mountinfo":                        v1mounts,
			"proc/self/cgroup":                           "4:memory:/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854710272\n",
		},
	}, {
		name: "v1 container that sees the host's path and only its own mount",
		files: map[string]string{
			"proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
			"proc/self/cgroup":    "4:memory:/docker/abc/inner\n",
			"sys/fs/cgroup/memory/inner/memory.limit_in_bytes": "3145728\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes":       "4194304\n",
		},
		want: Memory{Limit: 3 * memory.MiB, Headroom: 3 * memory.MiB, Cgroup: "v1"},
	}, {
		name: "group outside of the mount",
		files: map[string]string{
			"proc/self/mountinfo":      "41 31 0:38 /other /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			"proc/self/cgroup":         "0::/../sibling\n",
			"sys/fs/cgroup/memory.max": "1048576\n",
		},
		want: Memory{Limit: memory.MiB, Headroom: memory.MiB, Cgroup: "v2"},
	}, {
		name: "nonsense everywhere",
		files: map[string]string{
			"proc/self/mountinfo":      "x\n" + v2mount + "1 2 - cgroup2\n",
			"proc/self/cgroup":         "0::/a\nfour\n::\n",
			"sys/fs/cgroup/memory.max": "-5\n",
			"sys/fs/cgroup/cpu.max":    "100\n",
		},
	}} {
		t.Run(c.name, func(t *testing.T) {
			m := ReadFrom(machine(c.files))
			c.want.Total, c.want.Available = 64*memory.MiB, 32*memory.MiB
			if m.Memory != c.want {
				t.Errorf("memory %+v\nwant   %+v", m.Memory, c.want)
			}
			if m.CPU.Quota != c.quota {
				t.Errorf("quota %v, want %v", m.CPU.Quota, c.quota)
			}
		})
	}
}

func TestUsableTakesTheLeast(t *testing.T) {
	m := Memory{Total: 64, Available: 32, Limit: 16, Headroom: 8}
	if got := m.Usable(); got != 8 {
		t.Errorf("usable %d, want the headroom", got)
	}
	m.Available = 4
	if got := m.Usable(); got != 4 {
		t.Errorf("usable %d, want what the machine has", got)
	}
}

func TestThisMachine(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads /proc")
	}
	m := Read()
	if m.CPU.Threads < 1 || m.Memory.Total < 64*memory.MiB || int64(m.Memory.Total) > 1<<20*gib {
		t.Errorf("implausible: %+v", m)
	}
	if m.Memory.Available > m.Memory.Total || m.Memory.Usable() <= 0 {
		t.Errorf("implausible memory: %+v", m.Memory)
	}
}

// Whatever the files say, the reading ends and the numbers make sense.
func FuzzCgroups(f *testing.F) {
	f.Add("41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "0::/a/b", "8388608", "150000 100000")
	f.Add("35 31 0:32 /x /sys/fs/cgroup rw - cgroup cgroup rw,memory,cpu", "4:memory,cpu:/x/a", "-1", "-1")
	f.Fuzz(func(t *testing.T, mounts, group, limit, cpu string) {
		m := ReadFrom(machine(map[string]string{
			"proc/self/mountinfo":                   mounts,
			"proc/self/cgroup":                      group,
			"sys/fs/cgroup/memory.max":              limit,
			"sys/fs/cgroup/a/memory.max":            limit,
			"sys/fs/cgroup/a/memory.current":        limit,
			"sys/fs/cgroup/a/memory.stat":           "inactive_file " + limit,
			"sys/fs/cgroup/cpu.max":                 cpu,
			"sys/fs/cgroup/a/memory.limit_in_bytes": limit,
			"sys/fs/cgroup/a/cpu.cfs_quota_us":      cpu,
			"sys/fs/cgroup/a/cpu.cfs_period_us":     limit,
		}))
		if v := m.Memory; v.Limit < 0 || v.Headroom < 0 || v.Headroom > v.Limit || (v.Limit > 0) != (v.Cgroup != "") {
			t.Errorf("memory %+v", v)
		}
		if m.CPU.Quota < 0 {
			t.Errorf("quota %v", m.CPU.Quota)
		}
	})
}

// Every line that cannot be understood is passed over, whatever is wrong with it, and the
// tightest group of both versions counts.
func TestLinesOfEveryKind(t *testing.T) {
	const point = "/sys/fs/cgroup rw - "
	for _, x := range []struct {
		mounts, cgroup string
		limits         map[string]string
		want           Memory
		quota          float64
	}{
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"memory.max": "4096", "a/memory.max": "8192"}, Memory{Limit: 4096, Headroom: 4096, Cgroup: "v2"}, 0},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"memory.max": "8192", "a/memory.max": "4096"}, Memory{Limit: 4096, Headroom: 4096, Cgroup: "v2"}, 0},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "1::/a", map[string]string{"memory.max": "4096"}, Memory{}, 0},       // not version 2
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0:memory:/a", map[string]string{"memory.max": "4096"}, Memory{}, 0}, // nor this
		{"41 31 0:38 / " + point + "tmpfs tmpfs rw", "0::/a", map[string]string{"memory.max": "4096"}, Memory{}, 0},
		{"41 31 0:38 / " + point + "cgroup2 rw", "0::/a", map[string]string{"memory.max": "4096"}, Memory{}, 0}, // a field is missing
		{"31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"memory.max": "4096", "rw/memory.max": "1"}, Memory{}, 0},
		{"41 31 0:38 / /sys/fs/cgroup rw cgroup2 cgroup2 rw", "0::/a", map[string]string{"memory.max": "4096"}, Memory{}, 0},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"memory.max": "4096", "memory.current": "-5"}, Memory{Limit: 4096, Headroom: 4096, Cgroup: "v2"}, 0},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"memory.max": "4096x", "a/memory.max": "0"}, Memory{}, 0},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"memory.max": "4096", "memory.current": "5000"}, Memory{Limit: 4096, Headroom: 0, Cgroup: "v2"}, 0},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a/b", map[string]string{"cpu.max": "300000 100000", "a/cpu.max": "100000 200000", "a/b/cpu.max": "100000 100000"}, Memory{}, 0.5},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"cpu.max": "0 100000", "a/cpu.max": "100000 0"}, Memory{}, 0},
		{"41 31 0:38 / " + point + "cgroup2 cgroup2 rw", "0::/a", map[string]string{"cpu.max": "1 x"}, Memory{}, 0},
		{"35 31 0:32 / " + point + "cgroup cgroup rw,cpu,memory", "4:cpu,memory:/a", map[string]string{"memory.limit_in_bytes": "4096", "a/memory.limit_in_bytes": "8192", "cpu.cfs_quota_us": "5", "cpu.cfs_period_us": "2"}, Memory{Limit: 4096, Headroom: 4096, Cgroup: "v1"}, 2.5},
		{"35 31 0:32 / " + point + "cgroup cgroup rw,memory", "4:cpu:/a", map[string]string{"memory.limit_in_bytes": "4096"}, Memory{}, 0},
		{"35 31 0:32 /a " + point + "cgroup cgroup rw,memory", "4:memory:/a/b", map[string]string{"b/memory.limit_in_bytes": "4096", "a/b/memory.limit_in_bytes": "1"}, Memory{Limit: 4096, Headroom: 4096, Cgroup: "v1"}, 0},
		{"35 31 0:32 /a " + point + "cgroup cgroup rw,memory", "4:memory:/ab", map[string]string{"memory.limit_in_bytes": "4096", "b/memory.limit_in_bytes": "1"}, Memory{Limit: 4096, Headroom: 4096, Cgroup: "v1"}, 0},
	} {
		files := map[string]string{"proc/self/mountinfo": x.mounts + "\n", "proc/self/cgroup": x.cgroup + "\n"}
		for name, text := range x.limits {
			files["sys/fs/cgroup/"+name] = text + "\n"
		}
		m := ReadFrom(machine(files))
		x.want.Total, x.want.Available = 64*memory.MiB, 32*memory.MiB
		if m.Memory != x.want || m.CPU.Quota != x.quota || m.CPU.Arch != runtime.GOARCH {
			t.Errorf("%+v\nis %+v", x, m)
		}
	}
	for text, want := range map[string]memory.Bytes{"5 kB": 5 << 10, "x kB": 0, "-5 kB": 0, "": 0, "4503599627370496 kB": 1 << 62, "4503599627370497 kB": 0, "99999999999999999999 kB": 0} {
		if got := kibibytes(text); got != want {
			t.Errorf("%q is %d, want %d", text, got, want)
		}
	}
}
