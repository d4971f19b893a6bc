// This file owns the import rule, the table behind the picture in docs/ARCHITECTURE.md.
// Imports point downwards. Mechanisms import neither each other, nor the trainer, nor a
// concrete device. Packages that plan are pure.

package lint

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// layer is a row of the table.
type layer struct {
	pkg  string   // a package and all below it, unless a longer row matches
	may  []string // packages of this module that it may import, each with all below it
	test []string // packages that only its tests may import
	pure bool     // whether no path of imports may lead from here to a device
}

// exact marks an entry that stands for one package alone: "=device" does not allow
// "device/cuda".
const exact = "="

// devices lists what tests may import to run on real devices, under the race checker.
var devices = []string{"device", "internal/kernels", "internal/nulldevice", "internal/devicelog"}

// mechanism returns the row of a mechanism. Its tests may use its conformance suite.
func mechanism(name string) layer {
	return layer{
		pkg: "internal/" + name,
		may: []string{
			exact + "device", "internal/kernels", "internal/schedule", "internal/residency", "observe/trace",
			"internal/order", "internal/spell", "internal/parallel", "internal/memcopy", "memory",
		},
		test: append(slices.Clone(devices), "internal/golden", "internal/leak", "internal/"+name+"/"+name+"test"),
	}
}

// foundation lists what all packages may import: the vocabulary, and helpers that know
// nothing about this program.
var foundation = []string{
	"memory", "internal/golden", "internal/leak", "internal/spell", "internal/parallel", "internal/memcopy", "internal/sysinfo",
	"internal/order", "internal/gemm", "internal/vec", "internal/ptx", "internal/browser", "internal/pseudoterm", "internal/pagestyle",
	"internal/input", "internal/plaintext", "internal/eta",
}

// with returns the foundation and more packages.
func with(more ...string) []string { return append(slices.Clone(foundation), more...) }

var layers = []layer{
	{pkg: "memory", may: []string{"internal/spell"}, pure: true},
	{pkg: "internal", may: with(exact + "device"), test: devices},

	{pkg: "device", may: []string{"memory"}, test: devices},
	{pkg: "device/cpu", may: with(exact+"device", "internal/devicekit", "internal/kernels"), test: devices},
	{pkg: "device/cuda", may: with(exact+"device", "internal/devicekit", "internal/kernels"), test: devices},
	{pkg: "internal/blas", may: with(exact+"device", "device/cuda", "internal/kernels"), test: devices},
	{pkg: "device/check", may: with(exact+"device", "internal/devicekit", "internal/kernels"), test: devices},
	{pkg: "internal/devicekit", may: []string{exact + "device", "memory"}, test: devices},
	{pkg: "internal/nulldevice", may: []string{exact + "device", "internal/devicekit", "memory"}, test: append(slices.Clone(devices), "internal/golden")},
	{pkg: "device/devicetest", may: with(exact+"device", "internal/kernels"), test: devices},
	{pkg: "internal/kernels", may: with(exact+"device", "internal/devicekit"), test: devices},

	{pkg: "internal/schedule", may: with(), pure: true},
	{pkg: "internal/residency", may: with("internal/schedule"), pure: true},
	{pkg: "internal/policy", may: with("internal/residency", "internal/schedule", "observe/trace"), pure: true},
	{pkg: "internal/bucket", may: with(), pure: true},
	{pkg: "internal/launcher", may: []string{}, test: []string{"internal/golden"}, pure: true},
	{pkg: "internal/rendezvous", may: []string{"internal/launcher"}, test: []string{"internal/golden", "internal/leak"}, pure: true},
	{pkg: "plan", may: with("internal/bucket", "internal/schedule"), test: []string{"internal/planruns", "internal/plantest"}, pure: true},
	{pkg: "internal/plantest", may: with("plan"), pure: true},
	{pkg: "internal/planview", may: with("plan"), test: []string{"internal/plantest"}, pure: true},
	{pkg: "internal/planscan", may: with("plan", "internal/planview"), pure: true},
	{pkg: "internal/planruns", may: with("plan"), pure: true},
	{pkg: "internal/planvalidate", may: with("plan", "internal/planview", "internal/planruns"), test: []string{"internal/plantest"}, pure: true},
	{pkg: "internal/atomicfile", may: []string{"internal/input"}, test: []string{"internal/leak"}, pure: true},
	{pkg: "observe", may: with("observe", "internal/web"), pure: true},
	{pkg: "observe/trace", may: with(), pure: true},

	mechanism("stash"),
	mechanism("offload"),
	mechanism("capture"),
	mechanism("comm"),
	{pkg: "internal/comm/letter", may: with(exact + "internal/comm")},
	{pkg: "internal/comm/mpi", may: with(exact+"device", exact+"internal/comm", "internal/comm/letter", "internal/launcher", "internal/mpi"), test: append(slices.Clone(devices), "internal/comm/commtest")},
	{pkg: "internal/comm/nccl", may: with(exact+"device", "device/cuda", exact+"internal/comm", "internal/comm/letter", "internal/launcher", "internal/nccl"), test: append(slices.Clone(devices), "internal/comm/commtest", "internal/comm/mpi", "internal/comm/nccl/nccltest", "internal/leak")},
	{pkg: "internal/comm/nccl/nccltest", may: []string{exact + "device", "internal/nccl"}, test: devices},
	{pkg: "internal/comm/commtest", may: with(exact+"device", exact+"internal/comm"), test: devices},
	// Sharded parameters use the collectives and the pure plans of pools.
	{
		pkg:  "internal/fsdp",
		may:  with(exact+"device", "internal/kernels", "internal/bucket", "internal/comm", "observe/trace"),
		test: devices,
	},

	// The engine ties the mechanisms together; the root package is its API.
	{pkg: ".", may: with(exact+"device", "internal/engine", "internal/policy", "internal/schedule", "internal/stash", "observe/trace"), test: devices},
	{
		pkg:  "internal/engine",
		may:  with(exact+"device", "internal/kernels", "internal/stash", "internal/offload", "internal/capture", "internal/policy", "internal/residency", "internal/schedule", "plan", "observe/trace"),
		test: devices,
	},
	{pkg: "train/internal/data", may: with(), pure: true},
	{pkg: "train/internal/disk", may: with("internal/atomicfile"), pure: true},
	{pkg: "train/internal/checkpoint", may: with("train/internal/disk"), pure: true},
	{
		pkg:  "train",
		may:  with(exact+".", "internal/engine", exact+"device", "internal/nulldevice", "internal/kernels", "internal/comm", "internal/fsdp", "internal/bucket", "internal/schedule", "internal/stash", "internal/capture", "internal/policy", "internal/residency", "plan", "observe/trace", "train"),
		test: append(slices.Clone(devices), "internal/blas"),
	},
	// This package runs and resumes a run, and writes its report.
	{pkg: "train/run", may: with(exact+".", "internal/engine", exact+"device", "device", "internal/bucket", "internal/capture", "internal/comm", "internal/kernels", "internal/atomicfile", "internal/policy", "internal/profile", "internal/residency", "internal/stash", "plan", "observe", "train"), test: devices},
	{
		pkg:  "pytorch/bridge",
		may:  with(exact+".", "internal/engine", "pytorch/bridge", "device", "internal/kernels", "internal/version", "internal/offload", "internal/stash", "internal/policy", "internal/schedule", "plan", "observe"),
		test: devices,
	},
	{pkg: "pytorch/bridge/internal/choose", may: with("internal/policy", "internal/residency", "internal/schedule"), pure: true},
	// Commands choose the concrete device and may import everything. So may the packages that
	// only commands import.
	{pkg: "internal/bench", may: []string{"."}},
	{pkg: "internal/doctor", may: []string{"."}},
	{pkg: "cmd", may: []string{"."}},
}

// under reports whether an entry of the table covers a package.
func under(pkg, entry string) bool {
	if alone, ok := strings.CutPrefix(entry, exact); ok {
		return pkg == alone
	}
	return entry == "." || pkg == entry || strings.HasPrefix(pkg, entry+"/")
}

// layerOf returns the row with the longest match. The row of the root is for the root
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

// ours returns the packages of this module that a file imports.
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

// checkImports complains about imports that the table does not allow, and about packages
// without a row.
func checkImports(files []*file) (complaints []string) {
	graph := map[string][]string{}
	for _, f := range files {
		if f.syntax == nil || f.nested {
			continue
		}
		l, ok := layerOf(f.dir())
		if !ok {
			complaints = append(complaints, fmt.Sprintf("%s: package %s has no row in the table of imports; add one in internal/lint/imports_test.go", f.name, f.dir()))
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

// granted reports whether a file may import a package.
func granted(l layer, f *file, pkg string) bool {
	is := func(entry string) bool { return under(pkg, entry) }
	switch {
	case slices.ContainsFunc(l.may, is):
		return true
	case under(pkg, l.pkg) && under(f.dir(), l.pkg) && l.pkg != ".":
		// A package and those below it are one subject, unless the table gives
		// the other one a row of its own: device does not import device/cpu.
		other, _ := layerOf(pkg)
		return other.pkg == l.pkg || f.isTest() && slices.ContainsFunc(l.test, is)
	case f.isTest():
		return pkg == f.dir() || slices.ContainsFunc(l.test, is)
	}
	return false
}

// checkPure complains about pure packages whose imports lead to a device.
func checkPure(graph map[string][]string) (complaints []string) {
	for _, pkg := range slices.Sorted(maps.Keys(graph)) {
		if l, ok := layerOf(pkg); !ok || !l.pure {
			continue
		}
		seen := map[string]bool{}
		var reaches func(string) bool
		reaches = func(p string) bool {
			if under(p, "device") || under(p, "internal/kernels") {
				return true
			}
			seen[p] = true
			return slices.ContainsFunc(graph[p], func(q string) bool { return !seen[q] && reaches(q) })
		}
		if reaches(pkg) {
			complaints = append(complaints, fmt.Sprintf("%s is pure, but its imports lead to a device", pkg))
		}
	}
	return complaints
}

// checkCgo complains about C outside of pytorch/bridge: `CGO_ENABLED=0 go build` must build
// the whole program.
func checkCgo(files []*file) (complaints []string) {
	for _, f := range files {
		if under(f.dir(), "pytorch/bridge") || f.nested {
			continue
		}
		if strings.HasSuffix(f.name, ".c") || strings.HasSuffix(f.name, ".h") {
			complaints = append(complaints, f.name+": C source outside of pytorch/bridge")
		}
		if f.syntax == nil {
			continue
		}
		for _, spec := range f.syntax.Imports {
			if spec.Path.Value == `"C"` {
				complaints = append(complaints, f.name+": cgo outside of pytorch/bridge; call the library through purego")
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
		{"device/example_test.go", "/device/cpu", nil},
		{"device/cuda/x.go", "/device/cpu", []string{"device/cuda must not import device/cpu"}},
		{"device/cuda/x.go", "/internal/memcopy", nil},
		{"device/cuda/driver/x.go", "/device/cuda", nil},
		{"device/check/x_test.go", "/device/cpu", nil},
		{"internal/stash/x.go", "/internal/offload", []string{"internal/stash must not import internal/offload"}},
		{"internal/stash/x_test.go", "/internal/offload", []string{"internal/stash must not import internal/offload"}},
		{"internal/stash/x.go", "/device/cpu", []string{"internal/stash must not import device/cpu"}},
		{"internal/stash/x_test.go", "/device/cpu", nil},
		{"internal/bucket/pool/x.go", "/train", []string{"internal/bucket/pool must not import train"}},
		{"plan/x.go", "/device", []string{"plan must not import device", "plan is pure"}},
		{"train/x.go", "", nil},
		{"train/x.go", "/device/cuda", []string{"train must not import device/cuda"}},
		{"x.go", "/internal/engine", nil},
		{"x.go", "/train", []string{"must not import train"}},
		{"internal/kernels/x.go", "/internal/stash", []string{"internal/kernels must not import internal/stash"}},
		{"internal/memcopy/x.go", "/internal/kernels", []string{"internal/memcopy must not import internal/kernels"}},
		{"cmd/stowage/x.go", "/device/cuda", nil},
		{"cmd/stowage/x.go", "/train", nil},
		{"warehouse/x.go", "/device", []string{"no row in the table of imports"}},
	} {
		f := parseGo(t, c.name, head+c.imports+"\"\n")
		t.Run(c.name+c.imports, func(t *testing.T) { mustComplain(t, checkImports([]*file{f}), c.want...) })
	}
}

// A pure package must not reach a device through a helper either.
func TestPurePlanted(t *testing.T) {
	mustComplain(t, checkImports([]*file{
		parseGo(t, "internal/schedule/x.go", "package schedule\nimport _ \""+module+"/internal/order\"\n"),
		parseGo(t, "internal/order/x.go", "package order\nimport _ \""+module+"/device\"\n"),
	}), "internal/schedule is pure")
}

func TestCgoPlanted(t *testing.T) {
	const src = "package p\nimport \"C\"\n"
	mustComplain(t, checkCgo([]*file{
		parseGo(t, "internal/stash/x.go", src),
		parseGo(t, "pytorch/bridge/x.go", src),
		{name: "kernels/x.c"},
	}), "internal/stash/x.go", "kernels/x.c")
}
