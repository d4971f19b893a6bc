// This file tests which engine the ranks of several processes use.

package main

import (
	"strings"
	"testing"
)

func TestUseNCCL(t *testing.T) {
	gpu := func(name string) engine { return engine{GPU: name, NCCL: 22809} }
	with := func(e engine, f func(*engine)) engine { f(&e); return e }
	wants := func(want string) func(*engine) { return func(e *engine) { e.Want = want } }
	none := func(e *engine) { e.NCCL, e.Why = 0, "nccl: no NCCL library was found" }
	for _, c := range []struct {
		name string
		all  []engine
		use  bool
		err  string
	}{
		{"two GPUs", []engine{gpu("a"), gpu("b")}, true, ""},
		{"two GPUs, but not wanted", []engine{with(gpu("a"), wants("mpi")), with(gpu("b"), wants("mpi"))}, false, ""},
		{"one GPU for two", []engine{gpu("a"), gpu("a")}, false, ""},
		{"a library is missing", []engine{gpu("a"), with(gpu("b"), none)}, false, ""},
		{"a wanted library is missing", []engine{with(gpu("a"), wants("nccl")), with(with(gpu("b"), none), wants("nccl"))}, false, "STOWAGE_COLLECTIVES is nccl, but rank 1: nccl: no NCCL library was found"},
		{"a wanted GPU is missing", []engine{{Want: "nccl"}, {Want: "nccl"}}, false, "NCCL needs GPUs; give --device cuda"},
		{"one wanted GPU for two", []engine{with(gpu("a"), wants("nccl")), with(gpu("a"), wants("nccl"))}, false, "ranks 0 and 1 share a GPU"},
		{"versions differ", []engine{with(gpu("a"), wants("nccl")), with(gpu("b"), func(e *engine) { e.NCCL, e.Want = 22000, "nccl" })}, false, "rank 1 has NCCL 2.20.0 and rank 0 has 2.28.9"},
		{"wants differ", []engine{gpu("a"), with(gpu("b"), wants("mpi"))}, false, `is "" on rank 0 and "mpi" on rank 1; set it alike everywhere`},
		{"unknown", []engine{with(gpu("a"), wants("gloo")), gpu("b")}, false, `is "gloo"; choose nccl or mpi`},
	} {
		why, err := useNCCL(c.all)
		use := why == nil && err == nil
		if use != c.use || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v, %v", c.name, why, err)
		}
	}
}

// A process that was started alone refuses it, too, though it has no use for it.
func TestEngineOfOneProcess(t *testing.T) {
	t.Setenv(engineVariable, "gloo")
	if _, err := findPlace(); err == nil || !strings.Contains(err.Error(), `is "gloo"; choose nccl or mpi`) {
		t.Errorf("got %v", err)
	}
	t.Setenv(engineVariable, "mpi")
	if p, err := findPlace(); p != nil || err != nil {
		t.Errorf("got %v, %v", p, err)
	}
}
