// This file owns the tests of the kernel compiler: they run it on small sources
// of their own, and skip what needs clang where there is none.

package ptx

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
)

const header = `#pragma once
#define FACTOR 3
`

const source = `// A kernel for the test.
// targets: sm_80 sm_90

#include "h.cuh"

extern "C" __attribute__((global)) void k(unsigned long long *p, unsigned long long n) {
    *p = n * FACTOR; // a remark
}
`

func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func compiler(t *testing.T) *Compiler {
	t.Helper()
	c, err := Find()
	var missing *device.Unsupported
	if errors.As(err, &missing) {
		t.Skip(err)
	}
	return c
}

func TestFindSaysWhatIsMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Find()
	var missing *device.Unsupported
	if !errors.As(err, &missing) || !strings.Contains(err.Error(), "install the package clang-19") {
		t.Fatalf("without a compiler: %v", err)
	}
}

func TestGenerate(t *testing.T) {
	c := compiler(t)
	dir := folder(t, map[string]string{"k.cu": source, "h.cuh": header, "gone_sm80.ptx": "old"})
	changed, err := c.Generate(dir)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(changed)
	if want := []string{"gone_sm80.ptx", "k_sm80.ptx", "k_sm90.ptx"}; !slices.Equal(changed, want) {
		t.Fatalf("changed %q, want %q", changed, want)
	}
	if changed, err = c.Generate(dir); err != nil || len(changed) != 0 {
		t.Fatalf("a second run changed %q, error %v", changed, err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "k_sm80.ptx"))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"LLVM", "Begin function", dir, "remark"} {
		if bytes.Contains(text, []byte(word)) {
			t.Errorf("the PTX contains %q:\n%s", word, text)
		}
	}
	for _, word := range []string{".version 7.4\n", ".target sm_80\n", "mul.lo.s64"} {
		if !bytes.Contains(text, []byte(word)) {
			t.Errorf("the PTX lacks %q:\n%s", word, text)
		}
	}
	es := Entries(string(text))
	if len(es) != 1 || es[0].Name != "k" || !slices.Equal(es[0].Params, []string{"u64", "u64"}) {
		t.Errorf("entries %+v", es)
	}
}

// The same sources give the same PTX wherever they lie.
func TestFolderDoesNotMatter(t *testing.T) {
	c := compiler(t)
	files := map[string]string{"k.cu": source, "h.cuh": header}
	a, err := c.Compile(folder(t, files), "k.cu", "sm_80")
	if err != nil {
		t.Fatal(err)
	}
	b, err := c.Compile(folder(t, files), "k.cu", "sm_80")
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a, b) {
		t.Fatalf("two folders, two results:\n%s\n%s", a, b)
	}
}

func TestErrors(t *testing.T) {
	c := compiler(t)
	for name, files := range map[string]map[string]string{
		"undeclared identifier":     {"k.cu": "// targets: sm_80\nint f() { return x; }\n"},
		"names targets":             {"k.cu": "int x;\n"},
		`got "sm_7"`:                {"k.cu": "// targets: sm_7\n"},
		"no such file or directory": {"k.cu": "// targets: sm_80\n#include \"none.cuh\"\n"},
	} {
		if _, err := c.Generate(folder(t, files)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("error %v, want one with %q", err, name)
		}
	}
}

// A digest follows the source, its headers and the target, and nothing else.
func TestDigest(t *testing.T) {
	files := map[string]string{"k.cu": source, "h.cuh": header, "other.cuh": "int x;\n"}
	digest := func(target string) string {
		d, err := Digest(folder(t, files), "k.cu", target)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	first := digest("sm_80")
	if files["other.cuh"] = "int y;\n"; digest("sm_80") != first {
		t.Error("a header that is not included changed the digest")
	}
	if digest("sm_90") == first {
		t.Error("another target has the same digest")
	}
	if files["h.cuh"] = "#define FACTOR 4\n"; digest("sm_80") == first {
		t.Error("a changed header left the digest as it was")
	}
	if got := DigestOf("// Made\n// digest abc\n.version 7.4\n"); got != "abc" {
		t.Errorf("digest %q in PTX, want abc", got)
	}
	if got := DigestOf(".version 7.4\n"); got != "" {
		t.Errorf("digest %q in PTX that has none", got)
	}
}
