// This file tests that the planner knows exactly the modules of the one table,
// memory.Modules.

package plan_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// sources parses the planner's files, tests excepted.
func sources(t *testing.T) map[string]*ast.File {
	t.Helper()
	files := map[string]*ast.File{}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		files[path], err = parser.ParseFile(token.NewFileSet(), path, nil, 0)
		return err
	})
	if err != nil || len(files) < 40 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	return files
}

// literals returns the strings that are written in an expression.
func literals(e ast.Expr) (out []string) {
	ast.Inspect(e, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			if s, err := strconv.Unquote(lit.Value); err == nil {
				out = append(out, s)
			}
		}
		return true
	})
	return out
}

// A formula says for each tensor which group it belongs to and which modules offload
// or recompute it. All of them are in the table, with that choice.
func TestFormulasUseTheTable(t *testing.T) {
	names := map[string]int{}
	for path, f := range sources(t) {
		ast.Inspect(f, func(n ast.Node) bool {
			field, ok := n.(*ast.KeyValueExpr)
			if !ok {
				return true
			}
			key, ok := field.Key.(*ast.Ident)
			if !ok {
				return true
			}
			list, known := literals(field.Value), []string(nil)
			switch key.Name {
			case "Group":
				for _, m := range memory.Modules() {
					known = append(known, m.Name)
				}
			case "Offload":
				known = memory.MegatronModules(memory.Offload)
			case "Recompute":
				known = memory.MegatronModules(memory.Recompute)
			case "Stash":
				known = memory.MegatronModules(memory.Stash)
			default:
				return true
			}
			for _, name := range list {
				names[key.Name]++
				if !slices.Contains(known, name) {
					t.Errorf("%s: %s %q is not in the table of modules", path, key.Name, name)
				}
			}
			return true
		})
	}
	if names["Group"] < 20 || names["Offload"] < 8 || names["Recompute"] < 8 || names["Stash"] < 3 {
		t.Errorf("found only %v", names)
	}
}

// What may be offloaded, recomputed or stashed, what a module requires and what it
// covers is written in the table alone: no other list of modules decides it.
func TestNoOtherListOfModules(t *testing.T) {
	for path, f := range sources(t) {
		if dir := filepath.Dir(path); dir != "megatron" && dir != "search" && dir != "config" {
			continue
		}
		ast.Inspect(f, func(n ast.Node) bool {
			list, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			if _, isList := list.Type.(*ast.ArrayType); !isList {
				return true
			}
			modules := 0
			for _, e := range list.Elts {
				if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					if _, ok := memory.LookupModule(strings.Trim(lit.Value, `"`)); !ok {
						return true // a list of something else, such as scopes
					}
					modules++
				}
			}
			if modules > 1 {
				t.Errorf("%s: a list of modules at %v; take it from package memory", path, literals(list))
			}
			return true
		})
	}
}
