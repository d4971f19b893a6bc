// Package ptx compiles kernel sources (.cu) to PTX with clang alone: no CUDA
// toolkit is needed, because the sources are freestanding. The result depends on
// the sources and the compiler, never on the folder or the machine, so that a
// test can compare it with what is committed.
//
// A source says itself what it is compiled for, in a line of its opening comment:
//
//	// targets: sm_80 sm_90
//
// This file owns the compiling; source.go what is read from a source or from PTX.
package ptx

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/stowage-dev/stowage/device"
)

// compilerName is the compiler by major version: another version gives other
// code, and the committed PTX would never compare equal.
const compilerName = "clang-19"

// versions are the targets there are, each with its version of PTX. PTX 7.4
// needs a driver of CUDA 11.4, PTX 8.0 one of CUDA 12.0; a newer version buys
// nothing and shuts out older drivers.
var versions = map[string]string{
	"sm_80":  "74",
	"sm_90":  "80",
	"sm_90a": "81",
}

// Compiler is clang.
type Compiler struct {
	path string
}

// Find looks for the compiler. Where it is not installed the error is an
// [device.Unsupported].
func Find() (*Compiler, error) {
	path, err := exec.LookPath(compilerName)
	if err != nil {
		return nil, &device.Unsupported{
			What: "compiling kernels", Why: compilerName + " was not found",
			Need: "install the package " + compilerName,
		}
	}
	return &Compiler{path}, nil
}

// Version returns what the compiler prints as its version.
func (c *Compiler) Version() string {
	out, err := exec.Command(c.path, "--version").Output()
	if err != nil {
		return compilerName + " of unknown version"
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return line
}

// flags are what decides about the result besides the sources.
func flags(target string) ([]string, error) {
	version, ok := versions[target]
	if !ok {
		return nil, fmt.Errorf("expected a known target, such as sm_80, got %q", target)
	}
	return []string{
		"-x", "cuda", "--cuda-device-only", "--cuda-gpu-arch=" + target, "-nocudainc", "-nocudalib",
		"-std=c++17", "-O3", "-Wall", "-Wextra", "-Werror",
		"-Xclang", "-target-feature", "-Xclang", "+ptx" + version,
		"-S", "-o", "-",
	}, nil
}

// Compile compiles one source of a folder for one target.
func (c *Compiler) Compile(dir, source, target string) ([]byte, error) {
	args, err := flags(target)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", source, err)
	}
	digest, err := Digest(dir, source, target)
	if err != nil {
		return nil, err
	}
	var out, complaints bytes.Buffer
	// The compiler runs in the folder, so that no path can get into the result.
	cmd := exec.Command(c.path, append(args, source)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, &out, &complaints
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s for %s: %w\n%s", source, target, err, complaints.Bytes())
	}
	header := fmt.Sprintf("// Made from %s for %s by go generate; do not edit.\n// %s%s\n", source, target, digestMark, digest)
	return append([]byte(header), strip(out.Bytes())...), nil
}

// strip takes out comments, in which compilers name themselves, and empty lines. clang 19
// has no attribute for the size of a cluster, so the third launch bound stands for it: the
// largest size becomes the size.
func strip(ptx []byte) []byte {
	var out bytes.Buffer
	for line := range bytes.Lines(ptx) {
		line, _, _ = bytes.Cut(line, []byte("//"))
		line = bytes.Replace(line, []byte(".maxclusterrank"), []byte(".reqnctapercluster"), 1)
		if line = bytes.TrimRight(line, " \t\r\n"); len(line) > 0 {
			out.Write(line)
			out.WriteByte('\n')
		}
	}
	return out.Bytes()
}

// Build compiles every source of a folder for all its targets. The result is
// PTX by the name of the file it belongs in.
func (c *Compiler) Build(dir string) (map[string][]byte, error) {
	sources, err := Sources(dir)
	if err != nil {
		return nil, err
	}
	built := map[string][]byte{}
	for _, s := range sources {
		for _, target := range s.Targets {
			text, err := c.Compile(dir, s.Name, target)
			if err != nil {
				return nil, err
			}
			built[File(s.Name, target)] = text
		}
	}
	return built, nil
}

// Generate brings the PTX of a folder up to date and removes what no source
// gives any more. It returns the names of the files it changed.
func (c *Compiler) Generate(dir string) (changed []string, err error) {
	built, err := c.Build(dir)
	if err != nil {
		return nil, err
	}
	there, err := filepath.Glob(filepath.Join(dir, "*.ptx"))
	if err != nil {
		return nil, err
	}
	for _, path := range there {
		if _, ok := built[filepath.Base(path)]; !ok {
			if err := os.Remove(path); err != nil {
				return changed, err
			}
			changed = append(changed, filepath.Base(path))
		}
	}
	for name, text := range built {
		path := filepath.Join(dir, name)
		if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, text) {
			continue
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return changed, err
		}
		changed = append(changed, name)
	}
	return changed, nil
}
