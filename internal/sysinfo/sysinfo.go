// Package sysinfo reads what the machine lets this process use: processor features,
// threads, memory, and the limits that control groups put on both.
//
// Everything is read from files under a root file system, so that tests can
// show it any machine. A file that is missing or cannot be understood means
// "no limit known", never a failure: the numbers advise, they do not decide.
//
// This file owns the reading of the machine as a whole; cgroup.go the limits.
package sysinfo

import (
	"bufio"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// Machine is what one reading found.
type Machine struct {
	CPU    CPU    `json:"cpu"`
	Memory Memory `json:"memory"`
}

// CPU describes the processor.
type CPU struct {
	Model    string    `json:"model"`
	Arch     string    `json:"arch"`
	Threads  int       `json:"threads"`  // that the process may be scheduled on
	Quota    float64   `json:"quota"`    // threads' worth of time the cgroup grants, 0 if unlimited
	Features []Feature `json:"features"` // in a fixed order
}

// Feature is an instruction set that Stowage has code for.
type Feature struct {
	Name string `json:"name"`
	Has  bool   `json:"has"`
}

// Memory describes main memory. Limit and Headroom are zero without a limit.
type Memory struct {
	Total     memory.Bytes `json:"total"`
	Available memory.Bytes `json:"available"` // the kernel's estimate for the machine
	Limit     memory.Bytes `json:"limit"`     // smallest limit of the control groups around us
	Headroom  memory.Bytes `json:"headroom"`  // what the tightest group still grants
	Cgroup    string       `json:"cgroup"`    // "v1", "v2" or "" where there is none
}

// Usable returns the memory that can still be allocated: what the machine has left, or
// what the tightest control group grants if that is less.
func (m Memory) Usable() memory.Bytes {
	if m.Limit > 0 {
		return min(m.Available, m.Headroom)
	}
	return m.Available
}

// Read reads this machine.
func Read() Machine {
	m := ReadFrom(os.DirFS("/"))
	m.CPU.Threads = runtime.NumCPU()
	m.CPU.Features = ReadInstructions().features()
	if m.CPU.Model == "" {
		m.CPU.Model = brand()
	}
	return m
}

// ReadFrom reads the files of a machine whose root folder is given.
func ReadFrom(root fs.FS) Machine {
	var m Machine
	m.CPU.Arch = runtime.GOARCH
	m.CPU.Model = field(root, "proc/cpuinfo", "model name")
	m.Memory.Total = kibibytes(field(root, "proc/meminfo", "MemTotal"))
	m.Memory.Available = kibibytes(field(root, "proc/meminfo", "MemAvailable"))
	readCgroups(root, &m)
	return m
}

// field finds the first "name : value" line of a file under /proc.
func field(root fs.FS, path, name string) string {
	f, err := root.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		key, value, ok := strings.Cut(s.Text(), ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// kibibytes reads "123 kB" as /proc/meminfo writes it.
func kibibytes(s string) memory.Bytes {
	n, err := strconv.ParseInt(strings.TrimSuffix(s, " kB"), 10, 64)
	if err != nil || n < 0 || n > 1<<52 {
		return 0
	}
	return memory.Bytes(n) * memory.KiB
}
