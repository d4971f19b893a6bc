// This file owns the reading of the repository: every text file once, Go files
// parsed.

package lint

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/stowage-dev/stowage"

// file is one text file. Name is relative to the root, with slashes.
type file struct {
	name    string
	text    []byte
	nested  bool // it belongs to a module of its own inside the repository
	syntax  *ast.File
	fileset *token.FileSet
}

// parseGo makes a Go file from a string; the planted violations come from it.
func parseGo(t *testing.T, name, src string) *file {
	t.Helper()
	f := &file{name: name, text: []byte(src), fileset: token.NewFileSet()}
	syntax, err := parser.ParseFile(f.fileset, name, src, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	f.syntax = syntax
	return f
}

func (f *file) dir() string     { return path.Dir(f.name) }
func (f *file) isTest() bool    { return strings.HasSuffix(f.name, "_test.go") }
func (f *file) generated() bool { return f.syntax != nil && ast.IsGenerated(f.syntax) }

// lines counts as editors do: a last line without an end counts too.
func (f *file) lines() int {
	n := bytes.Count(f.text, []byte("\n"))
	if len(f.text) > 0 && f.text[len(f.text)-1] != '\n' {
		n++
	}
	return n
}

// repository reads the tree once for all tests of the package.
var repository = sync.OnceValues(func() ([]*file, error) { return readTree(filepath.Join("..", "..")) })

func repo(t *testing.T) []*file {
	t.Helper()
	files, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 20 {
		t.Fatalf("only %d files found: the root is wrong", len(files))
	}
	return files
}

// skipped says which folders hold no source of ours.
func skipped(name string) bool {
	switch name {
	case "build", "runs", "node_modules", "__pycache__":
		return true
	case ".", ".ci", ".github":
		return false
	}
	return strings.HasPrefix(name, ".") && name != ".."
}

// foreign says which files are not written here: libraries of the web that are
// embedded as they are, and what `stowage train` leaves at the root.
func foreign(name string) bool {
	return strings.HasSuffix(name, ".min.js") || strings.HasSuffix(name, ".min.css") || name == "report.html"
}

func readTree(root string) (files []*file, err error) {
	var nested []string
	err = filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, p)
		if err != nil {
			return err
		}
		rel = filepath.ToSlash(rel)
		switch {
		case d.IsDir() && skipped(path.Base(rel)):
			return fs.SkipDir
		case !d.Type().IsRegular() || foreign(rel):
			return nil
		}
		text, err := os.ReadFile(p)
		if err != nil || bytes.IndexByte(text, 0) >= 0 {
			return err // a NUL byte: not text
		}
		if path.Base(rel) == "go.mod" && rel != "go.mod" {
			nested = append(nested, path.Dir(rel)+"/")
		}
		f := &file{name: rel, text: text, fileset: token.NewFileSet()}
		if strings.HasSuffix(rel, ".go") {
			f.syntax, err = parser.ParseFile(f.fileset, rel, text, parser.ParseComments|parser.SkipObjectResolution)
		}
		files = append(files, f)
		return err
	})
	for _, f := range files {
		f.nested = slices.ContainsFunc(nested, func(dir string) bool { return strings.HasPrefix(f.name, dir) })
	}
	return files, err
}

// complain fails the test once for every complaint.
func complain(t *testing.T, complaints []string) {
	t.Helper()
	for _, c := range complaints {
		t.Error(c)
	}
}

// mustComplain is for planted violations: exactly the given words, in order,
// must each be part of one complaint.
func mustComplain(t *testing.T, complaints []string, words ...string) {
	t.Helper()
	if len(complaints) != len(words) {
		t.Fatalf("%d complaints, want %d: %q", len(complaints), len(words), complaints)
	}
	for i, w := range words {
		if !strings.Contains(complaints[i], w) {
			t.Errorf("complaint %q does not say %q", complaints[i], w)
		}
	}
}
