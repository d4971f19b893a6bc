// This file owns reading the repository: each text file once, with Go files parsed.

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

// file is a text file. Its name is relative to the root, with slashes.
type file struct {
	name    string
	text    []byte
	nested  bool // whether it belongs to another module inside of the repository
	syntax  *ast.File
	fileset *token.FileSet
}

// parseGo returns a Go file with the given source, for planted violations.
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

// lines returns the number of lines. A last line without a newline counts too.
func (f *file) lines() int {
	n := bytes.Count(f.text, []byte("\n"))
	if len(f.text) > 0 && f.text[len(f.text)-1] != '\n' {
		n++
	}
	return n
}

// repository reads the tree once for all tests.
var repository = sync.OnceValues(func() ([]*file, error) { return readTree(filepath.Join("..", "..")) })

// repo returns all files of the repository.
func repo(t *testing.T) []*file {
	t.Helper()
	files, err := repository()
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 20 {
		t.Fatalf("found only %d files; the root is wrong", len(files))
	}
	return files
}

// skipped reports whether a folder holds no source files.
func skipped(name string) bool {
	switch name {
	case "build", "runs", "node_modules", "__pycache__":
		return true
	case ".", ".ci", ".github":
		return false
	}
	return strings.HasPrefix(name, ".") && name != ".."
}

// foreign reports whether a file is not written here: an embedded web library, a report
// that `stowage train` wrote, or the file that links a second working tree.
func foreign(name string) bool {
	return strings.HasSuffix(name, ".min.js") || strings.HasSuffix(name, ".min.css") || name == "report.html" || name == ".git"
}

// readTree reads all text files below root.
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
			return err // a file with a NUL byte is not text
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

// complain fails the test once for each complaint.
func complain(t *testing.T, complaints []string) {
	t.Helper()
	for _, c := range complaints {
		t.Error(c)
	}
}

// mustComplain checks the complaints about planted violations: the n-th complaint must
// contain the n-th words, and there must be no others.
func mustComplain(t *testing.T, complaints []string, words ...string) {
	t.Helper()
	if len(complaints) != len(words) {
		t.Fatalf("got %d complaints, want %d: %q", len(complaints), len(words), complaints)
	}
	for i, w := range words {
		if !strings.Contains(complaints[i], w) {
			t.Errorf("complaint %q does not contain %q", complaints[i], w)
		}
	}
}
