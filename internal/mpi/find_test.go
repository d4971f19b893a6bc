// This file owns the tests of which library is opened.

package mpi

import (
	"runtime"
	"strings"
	"testing"
)

// The library is that of the launcher; STOWAGE_MPI names another.
func TestCandidates(t *testing.T) {
	for _, c := range []struct {
		env   string
		first string
		size  int
	}{
		{"", "libmpi.so.40", 0},
		{"OMPI_COMM_WORLD_SIZE=4", "libmpi.so.40", 4},
		{"PMI_RANK=1 PMI_SIZE=8", "libmpich.so.12", 8},
		{"PMI_FD=9", "libmpich.so.12", 0},
		{"PMIX_RANK=0 SLURM_NTASKS=2", "libmpi.so.40", 2},
		{"SLURM_NTASKS=2", "libmpi.so.40", 0},
		{"PMI_RANK=1 PMI_SIZE=8 STOWAGE_MPI=/opt/libmpi.so", "/opt/libmpi.so", 8},
	} {
		env := map[string]string{}
		for _, v := range strings.Fields(c.env) {
			name, value, _ := strings.Cut(v, "=")
			env[name] = value
		}
		names, size := candidates(func(name string) string { return env[name] })
		if names[0] != c.first || size != c.size {
			t.Errorf("%q: %v for %d processes", c.env, names, size)
		}
	}
}

// A missing library, and one that is not MPI, are explained.
func TestLibraryIsMissing(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("libraries have other names")
	}
	for name, words := range map[string]string{
		"libnothing.so.1": "no MPI library was found",
		"libc.so.6":       "libc.so.6 has no function MPI_Init_thread",
	} {
		if _, err := open([]string{name}); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
