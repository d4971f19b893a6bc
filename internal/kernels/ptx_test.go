// This file owns the tests of the compiled kernels: that they are up to date, and what can
// be checked without a GPU.

package kernels

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/ptx"
	"github.com/stowage-dev/stowage/memory"
)

// Stale PTX is found even without a compiler, because it contains the digest of the
// sources.
func TestPTXBelongsToItsSource(t *testing.T) {
	sources, err := ptx.Sources(".")
	if err != nil {
		t.Fatal(err)
	}
	if len(sources) == 0 {
		t.Fatal("no kernel sources were found")
	}
	for _, s := range sources {
		for _, target := range s.Targets {
			name := ptx.File(s.Name, target)
			text, err := os.ReadFile(name)
			if err != nil {
				t.Errorf("%v; run go generate ./kernels", err)
				continue
			}
			want, err := ptx.Digest(".", s.Name, target)
			if err != nil {
				t.Fatal(err)
			}
			if ptx.DigestOf(string(text)) != want {
				t.Errorf("%s was made from another %s; run go generate ./kernels", name, s.Name)
			}
		}
	}
}

// Every kernel is an entry of its image, with eight bytes a parameter and as many
// parameters as its launch has arguments.
func TestPTXMatchesLaunches(t *testing.T) {
	a := device.NewBuffer(memory.Device, 1<<20, room, room, "a")
	b := device.NewBuffer(memory.Device, 1<<30, room, room, "b")
	seen := map[*device.Kernel]bool{}
	for name, launch := range everyLaunch(a, b) {
		l := launch()
		seen[l.Kernel] = true
		for _, v := range l.Kernel.Image.Variants {
			es := ptx.Entries(v.PTX)
			i := slices.IndexFunc(es, func(e ptx.Entry) bool { return e.Name == l.Kernel.Name })
			if i < 0 {
				t.Errorf("%s: no entry %s in %s for %d.%d", name, l.Kernel.Name, l.Kernel.Image.Name, v.Major, v.Minor)
				continue
			}
			if want := slices.Repeat([]string{"u64"}, len(l.Args())); !slices.Equal(es[i].Params, want) {
				t.Errorf("%s: parameters %v, arguments %v", name, es[i].Params, want)
			}
			threads := regexp.MustCompile(`\.maxntid (\d+), 1, 1`).FindStringSubmatch(es[i].Body)
			if want := l.Block[0]; threads == nil || threads[1] != strconv.Itoa(int(want)) {
				t.Errorf("%s: compiled for %v threads a block, launched with %d", name, threads, want)
			}
		}
	}
	for _, k := range allKernels() {
		if !seen[k] {
			t.Errorf("no launch of %s was tried", k.Name)
		}
	}
}

// A kernel calls only what exists, keeps its variables in registers, and moves data in
// vectors of 16 bytes.
func TestPTXIsFreestanding(t *testing.T) {
	for _, k := range allKernels() {
		for _, v := range k.Image.Variants {
			for _, word := range []string{".extern", ".func", "call", ".local"} {
				if strings.Contains(v.PTX, word) {
					t.Errorf("%s: the PTX contains %q", k.Image.Name, word)
				}
			}
		}
	}
	vector := map[*device.Kernel][]string{
		&copyKernel:     {"ld.global.cs.v4.u32", "st.global.cs.v4.u32"},
		&fillKernel:     {"st.global.cs.v4.u32"},
		&checksumKernel: {"ld.global.cs.v4.u32", "red.global.add.u64"},
		&markKernel:     {"%globaltimer"},
		&waitKernel:     {"%globaltimer", "nanosleep.u32"},
		&noiseKernel:    {"st.global.cs.v4.u32"},
	}
	for i := range reduceKernels {
		for k := range reduceKernels[i] {
			vector[&reduceKernels[i][k]] = []string{"ld.global.cs.v4.u32", "st.global.cs.v4.u32", "add.f32", "div.rn.f32"}
		}
	}
	for _, k := range allKernels() {
		es := ptx.Entries(k.Image.Variants[0].PTX)
		i := slices.IndexFunc(es, func(e ptx.Entry) bool { return e.Name == k.Name })
		for _, word := range vector[k] {
			if i < 0 || !strings.Contains(es[i].Body, word) {
				t.Errorf("%s has no %s", k.Name, word)
			}
		}
	}
}
