// This file owns two rules: a comment at the top of each file, and the compiled form
// beside each kernel source.

package lint

import (
	"bytes"
	"path"
	"strings"
	"testing"
)

// checkHeaders wants a comment at the top of each file that says what the file owns. A
// test that is named after the file it tests needs none.
func checkHeaders(files []*file) (complaints []string) {
	names := map[string]bool{}
	for _, f := range files {
		names[f.name] = true
	}
	for _, f := range files {
		tested, isTest := strings.CutSuffix(f.name, "_test.go")
		switch {
		case isTest && names[tested+".go"]:
		case f.syntax != nil && !hasHeader(f):
			complaints = append(complaints, f.name+": write a comment above the package clause that says what the file owns")
		case path.Ext(f.name) == ".cu" && !bytes.HasPrefix(f.text, []byte("//")):
			complaints = append(complaints, f.name+": write a comment at the top that says what the file owns")
		}
	}
	return complaints
}

// hasHeader reports whether a file has a comment above the package clause that is more
// than build constraints and directives.
func hasHeader(f *file) bool {
	for _, group := range f.syntax.Comments {
		if group.Pos() > f.syntax.Package {
			break
		}
		if strings.TrimSpace(group.Text()) != "" {
			return true
		}
	}
	return false
}

// checkKernels wants each x.cu to have x.ptx beside it, or a file such as x_sm80.ptx for
// each architecture, and each .ptx to have its source.
func checkKernels(files []*file) (complaints []string) {
	names := map[string]bool{}
	for _, f := range files {
		names[f.name] = true
	}
	compiled := map[string]bool{}
	for _, f := range files {
		if path.Ext(f.name) != ".ptx" {
			continue
		}
		source := strings.TrimSuffix(f.name, ".ptx")
		if base, arch, ok := cutLast(source); ok && strings.HasPrefix(arch, "sm") && !names[source+".cu"] {
			source = base
		}
		if !names[source+".cu"] {
			complaints = append(complaints, f.name+": expected "+path.Base(source)+".cu beside it")
		}
		compiled[source+".cu"] = true
	}
	for _, f := range files {
		if path.Ext(f.name) == ".cu" && !compiled[f.name] {
			complaints = append(complaints, f.name+": expected a .ptx beside it; run go generate ./internal/kernels/...")
		}
	}
	return complaints
}

// cutLast splits a name at its last underscore, dot or hyphen before the architecture.
func cutLast(name string) (before, after string, ok bool) {
	i := strings.LastIndexAny(name, "_.-")
	if i >= 0 && strings.HasPrefix(name[i:], "_90") {
		i = strings.LastIndexAny(name[:i], "_.-")
	}
	if i < 0 {
		return name, "", false
	}
	return name[:i], name[i+1:], true
}

func TestHeaders(t *testing.T) { complain(t, checkHeaders(repo(t))) }

func TestKernelsCompiled(t *testing.T) { complain(t, checkKernels(repo(t))) }

func TestHeadersPlanted(t *testing.T) {
	mustComplain(t, checkHeaders([]*file{
		parseGo(t, "a.go", "package p\n\n// F is late.\nfunc F() {}\n"),
		parseGo(t, "a_test.go", "package p\n"),
		parseGo(t, "z_test.go", "package p\n"),
		parseGo(t, "b.go", "//go:build linux\n\npackage p\n"),
		parseGo(t, "c.go", "//go:build linux\n\n// This file owns c.\n\npackage p\n"),
		parseGo(t, "d.go", "// Package p is documented.\npackage p\n"),
		{name: "e.cu", text: []byte("extern int x;\n")},
	}), "a.go", "z_test.go", "b.go", "e.cu")
}

func TestKernelsPlanted(t *testing.T) {
	mustComplain(t, checkKernels([]*file{
		{name: "kernels/copy.cu"}, {name: "kernels/copy.ptx"},
		{name: "kernels/page_pool.cu"}, {name: "kernels/page_pool_sm80.ptx"}, {name: "kernels/page_pool_sm90a.ptx"},
		{name: "kernels/x.cu"}, {name: "kernels/x.sm_90a.ptx"},
		{name: "kernels/lost.ptx"},
		{name: "kernels/late.cu"},
	}), "lost.ptx", "late.cu")
}
