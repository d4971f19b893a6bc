// This file owns the import rule: the picture of docs/ARCHITECTURE.md as a
// table. Imports point downwards; mechanisms know neither each other, nor the
// trainer, nor a concrete device; what plans is pure.

package lint

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// layer is one row of the picture.
type layer struct {
	pkg  string   // a package with all below it, unless a longer row matches
	may  []string // what it may import of ours, each with all below it
	test []string // what its tests may import beyond that
	pure bool     // no path of imports leads from here to a device
}

// exact marks an entry that stands for the package alone: importing "=device"
// does not grant "device/cuda".
const exact = "="

// The tests of everything that is written against the contract run on real
// devices, under check.
var devices = []string{"device", "kernels"}

func mechanism(name string) layer {
	return layer{
		pkg:  name,
		may:  []string{exact + "device", "kernels", "schedule", "residency", "plan", "trace", "internal"},
		test: devices,
	}
}

var layers = []layer{
	{pkg: "device", test: devices},
	{pkg: "device/cpu", may: []string{exact + "device", "kernels", "internal"}, test: devices},
	{pkg: "device/cuda", may: []string{exact + "device", "kernels", "internal"}, test: devices},
	{pkg: "device/check", may: []string{exact + "device", "kernels", "internal"}, test: devices},
	{pkg: "device/null", may: []string{exact + "device"}, test: devices},
	{pkg: "device/devicetest", may: []string{exact + "device", "kernels", "internal"}, test: devices},
	{pkg: "kernels", may: []string{exact + "device", "internal"}, test: devices},
	{pkg: "internal", may: []string{exact + "device"}, test: devices},

	{pkg: "schedule", may: []string{"internal"}, pure: true},
	{pkg: "routing", may: []string{"internal"}, pure: true},
	{pkg: "residency", may: []string{"schedule", "internal"}, pure: true},
	{pkg: "policy", may: []string{"residency", "schedule", "trace", "internal"}, pure: true},
	{pkg: "model", may: []string{"internal"}, pure: true},
	{pkg: "bucket", may: []string{"internal"}, pure: true},
	{pkg: "plan", may: []string{"model", "bucket", "schedule", "routing", "internal"}, pure: true},
	{pkg: "trace", may: []string{"internal"}, pure: true},
	{pkg: "report", may: []string{"trace", "plan", "schedule", "routing", "internal"}, pure: true},

	mechanism("stash"),
	mechanism("offload"),
	mechanism("capture"),
	mechanism("comm"),
	// Sharded parameters stand on the collectives and on the pure plans of pools.
	{
		pkg:  "fsdp",
		may:  []string{exact + "device", "kernels", "bucket", "comm", "trace", "internal"},
		test: devices,
	},

	// The root package ties the mechanisms together.
	{
		pkg:  ".",
		may:  []string{exact + "device", "kernels", "stash", "offload", "capture", "policy", "residency", "plan", "schedule", "trace", "internal"},
		test: devices,
	},
	{pkg: "train/data", may: []string{"internal"}, pure: true},
	{pkg: "train/checkpoint", may: []string{"internal"}, pure: true},
	{
		pkg:  "train",
		may:  []string{exact + ".", exact + "device", "device/null", "kernels", "comm", "fsdp", "bucket", "model", "plan", "schedule", "routing", "stash", "capture", "policy", "trace", "train", "internal"},
		test: devices,
	},
	{
		pkg:  "bridge",
		may:  []string{exact + ".", "bridge", "device", "kernels", "offload", "stash", "policy", "plan", "schedule", "trace", "report", "internal"},
		test: devices,
	},
	// Commands choose the concrete device and may use everything.
	{pkg: "cmd", may: []string{"."}},
}

// under tells whether a package is granted by an entry of the table.
func under(pkg, entry string) bool {
	if alone, ok := strings.CutPrefix(entry, exact); ok {
		return pkg == alone
	}
	return entry == "." || pkg == entry || strings.HasPrefix(pkg, entry+"/")
}

// layerOf finds the row with the longest match; the root's row is for the root
// package alone.
func layerOf(pkg string) (best layer, ok bool) {
	for _, l := range layers {
		match := under(pkg, l.pkg)
		if l.pkg == "." {
			match = pkg == "."
		}
		if match && (!ok || len(l.pkg) > len(best.pkg)) {
			best, ok = l, true
		}
	}
	return best, ok
}

// ours lists the packages of this module that a file imports.
func ours(f *file) (pkgs []string) {
	for _, spec := range f.syntax.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue
		}
		if p == module {
			pkgs = append(pkgs, ".")
		} else if rel, ok := strings.CutPrefix(p, module+"/"); ok {
			pkgs = append(pkgs, rel)
		}
	}
	return pkgs
}

func checkImports(files []*file) (complaints []string) {
	graph := map[string][]string{}
	for _, f := range files {
		if f.syntax == nil || f.nested {
			continue
		}
		l, ok := layerOf(f.dir())
		if !ok {
			complaints = append(complaints, fmt.Sprintf("%s: package %s has no place in the picture; add it to the table in internal/lint/imports_test.go", f.name, f.dir()))
			continue
		}
		for _, pkg := range ours(f) {
			if !f.isTest() {
				graph[f.dir()] = append(graph[f.dir()], pkg)
			}
			if !granted(l, f, pkg) {
				complaints = append(complaints, fmt.Sprintf("%s: %s must not import %s", f.name, f.dir(), pkg))
			}
		}
	}
	return append(complaints, checkPure(graph)...)
}

func granted(l layer, f *file, pkg string) bool {
	is := func(entry string) bool { return under(pkg, entry) }
	switch {
	case slices.ContainsFunc(l.may, is):
		return true
	case under(pkg, l.pkg) && under(f.dir(), l.pkg) && l.pkg != ".":
		// A package and those below it are one subject, unless the table gives
		// the other one a row of its own: device does not import device/cpu.
		other, _ := layerOf(pkg)
		return other.pkg == l.pkg
	case f.isTest():
		return pkg == f.dir() || slices.ContainsFunc(l.test, is)
	}
	return false
}

// checkPure follows the imports of pure packages to the end.
func checkPure(graph map[string][]string) (complaints []string) {
	for _, pkg := range slices.Sorted(maps.Keys(graph)) {
		if l, ok := layerOf(pkg); !ok || !l.pure {
			continue
		}
		seen := map[string]bool{}
		var reaches func(string) bool
		reaches = func(p string) bool {
			if under(p, "device") || under(p, "kernels") {
				return true
			}
			seen[p] = true
			return slices.ContainsFunc(graph[p], func(q string) bool { return !seen[q] && reaches(q) })
		}
		if reaches(pkg) {
			complaints = append(complaints, fmt.Sprintf("%s is pure, yet its imports lead to a device", pkg))
		}
	}
	return complaints
}

// checkCgo keeps C out: `CGO_ENABLED=0 go build` must give the whole program.
func checkCgo(files []*file) (complaints []string) {
	for _, f := range files {
		if under(f.dir(), "bridge") || f.nested {
			continue
		}
		if strings.HasSuffix(f.name, ".c") || strings.HasSuffix(f.name, ".h") {
			complaints = append(complaints, f.name+": C source outside of bridge")
		}
		if f.syntax == nil {
			continue
		}
		for _, spec := range f.syntax.Imports {
			if spec.Path.Value == `"C"` {
				complaints = append(complaints, f.name+": cgo outside of bridge; call the library through purego")
			}
		}
	}
	return complaints
}

func TestImports(t *testing.T) { complain(t, checkImports(repo(t))) }

func TestNoCgo(t *testing.T) { complain(t, checkCgo(repo(t))) }

func TestImportsPlanted(t *testing.T) {
	const head = "package p\nimport _ \"" + module
	for _, c := range []struct {
		name, imports string
		want          []string
	}{
		{"device/x.go", "/internal/memcopy", []string{"device must not import internal/memcopy"}},
		{"device/x.go", "/device/cpu", []string{"device must not import device/cpu"}},
		{"device/cuda/x.go", "/device/cpu", []string{"device/cuda must not import device/cpu"}},
		{"device/cuda/x.go", "/internal/memcopy", nil},
		{"device/cuda/driver/x.go", "/device/cuda", nil},
		{"device/check/x_test.go", "/device/cpu", nil},
		{"stash/x.go", "/offload", []string{"stash must not import offload"}},
		{"stash/x_test.go", "/offload", []string{"stash must not import offload"}},
		{"stash/x.go", "/device/cpu", []string{"stash must not import device/cpu"}},
		{"stash/x_test.go", "/device/cpu", nil},
		{"bucket/pool/x.go", "/train", []string{"bucket/pool must not import train"}},
		{"plan/x.go", "/device", []string{"plan must not import device", "plan is pure"}},
		{"train/x.go", "", nil},
		{"train/x.go", "/device/cuda", []string{"train must not import device/cuda"}},
		{"x.go", "/stash", nil},
		{"x.go", "/train", []string{"must not import train"}},
		{"kernels/x.go", "/stash", []string{"kernels must not import stash"}},
		{"internal/memcopy/x.go", "/kernels", []string{"internal/memcopy must not import kernels"}},
		{"cmd/stowage/x.go", "/device/cuda", nil},
		{"cmd/stowage/x.go", "/train", nil},
		{"warehouse/x.go", "/device", []string{"no place in the picture"}},
	} {
		f := parseGo(t, c.name, head+c.imports+"\"\n")
		t.Run(c.name+c.imports, func(t *testing.T) { mustComplain(t, checkImports([]*file{f}), c.want...) })
	}
}

// A pure package must not reach a device through a helper either.
func TestPurePlanted(t *testing.T) {
	mustComplain(t, checkImports([]*file{
		parseGo(t, "schedule/x.go", "package schedule\nimport _ \""+module+"/internal/helper\"\n"),
		parseGo(t, "internal/helper/x.go", "package helper\nimport _ \""+module+"/device\"\n"),
	}), "schedule is pure")
}

func TestCgoPlanted(t *testing.T) {
	const src = "package p\nimport \"C\"\n"
	mustComplain(t, checkCgo([]*file{
		parseGo(t, "stash/x.go", src),
		parseGo(t, "bridge/x.go", src),
		{name: "kernels/x.c"},
	}), "stash/x.go", "kernels/x.c")
}
