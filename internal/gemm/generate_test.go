// This file owns the test that the assembly is the output of its generator.

package gemm

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func TestGenerated(t *testing.T) {
	if testing.Short() {
		t.Skip("it builds the generator, which takes some seconds")
	}
	root := t.TempDir()
	if err := os.CopyFS(filepath.Join(root, "gen"), os.DirFS("gen")); err != nil {
		t.Fatal(err)
	}
	// The arguments are those of go generate: they are in the files' first lines.
	run := func(args ...string) ([]byte, error) {
		cmd := exec.Command("go", args...)
		cmd.Dir = filepath.Join(root, "gen")
		cmd.Env = append(os.Environ(), "GOPROXY=off", "GOFLAGS=-mod=readonly", "GOWORK=off")
		return cmd.CombinedOutput()
	}
	if _, err := run("list", "-deps", "."); err != nil {
		t.Skip("the generator's modules are not here; `go mod download` in internal/gemm/gen brings them")
	}
	if out, err := run("run", "main.go", "-out", "../tile_amd64.s", "-stubs", "../tile_amd64.go", "-pkg", "gemm"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, name := range []string{"tile_amd64.s", "tile_amd64.go"} {
		got, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s is not what gen gives; run go generate ./internal/gemm", name)
		}
	}
}
