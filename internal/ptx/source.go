// This file owns what is read from a kernel source and from PTX: targets,
// digests, entry points.

package ptx

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Source is a kernel source with the targets that it is compiled for.
type Source struct {
	Name    string // in its folder
	Targets []string
}

var targetsLine = regexp.MustCompile(`(?m)^// targets: (.+)$`)

// Sources returns the kernel sources of a folder, sorted by name. It returns an error if a
// source does not name its targets.
func Sources(dir string) ([]Source, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.cu"))
	if err != nil {
		return nil, err
	}
	var sources []Source
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		m := targetsLine.FindSubmatch(text)
		if m == nil {
			return nil, fmt.Errorf("%s: expected a comment that names targets, such as \"// targets: sm_80\"", path)
		}
		sources = append(sources, Source{filepath.Base(path), strings.Fields(string(m[1]))})
	}
	slices.SortFunc(sources, func(a, b Source) int { return strings.Compare(a.Name, b.Name) })
	return sources, nil
}

// File returns the name of the PTX of a source: copy_sm80.ptx for copy.cu and sm_80.
func File(source, target string) string {
	return strings.TrimSuffix(source, ".cu") + "_" + strings.ReplaceAll(target, "_", "") + ".ptx"
}

const digestMark = "digest "

var includeLine = regexp.MustCompile(`(?m)^#include "(.+)"$`)

// Digest is a number for everything of ours that decides about the PTX of a
// source: its text, the headers it includes and the compiler's flags. It stands
// in the PTX, so that stale PTX is found where there is no compiler.
func Digest(dir, source, target string) (string, error) {
	args, err := flags(target)
	if err != nil {
		return "", fmt.Errorf("%s: %w", source, err)
	}
	h := sha256.New()
	fmt.Fprintf(h, "%s %q\n", compilerName, args)
	names := []string{source}
	for i := 0; i < len(names); i++ {
		text, err := os.ReadFile(filepath.Join(dir, names[i]))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%s %d\n%s\n", names[i], len(text), text)
		for _, m := range includeLine.FindAllSubmatch(text, -1) {
			if name := string(m[1]); !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return hex.EncodeToString(h.Sum(nil))[:32], nil
}

// DigestOf returns the digest that PTX contains, or "".
func DigestOf(ptx string) string {
	_, rest, ok := strings.Cut(ptx, "\n// "+digestMark)
	if !ok {
		return ""
	}
	digest, _, _ := strings.Cut(rest, "\n")
	return digest
}

// Entry is a kernel in PTX.
type Entry struct {
	Name   string
	Params []string // the types of its parameters: "u64"
	Body   string
}

var (
	entryHead = regexp.MustCompile(`(?s)\.visible \.entry (\w+)\((.*?)\)`)
	paramType = regexp.MustCompile(`\.param \.(\w+) `)
)

// Entries returns the kernels in PTX.
func Entries(ptx string) (entries []Entry) {
	at := entryHead.FindAllStringSubmatchIndex(ptx, -1)
	for i, m := range at {
		end := len(ptx)
		if i+1 < len(at) {
			end = at[i+1][0]
		}
		e := Entry{Name: ptx[m[2]:m[3]], Body: ptx[m[1]:end]}
		for _, p := range paramType.FindAllStringSubmatch(ptx[m[4]:m[5]], -1) {
			e.Params = append(e.Params, p[1])
		}
		entries = append(entries, e)
	}
	return entries
}
