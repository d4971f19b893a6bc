// This file owns two rules for the public API: it grows only on purpose, and each
// public package shows its use in an example.

package lint

import (
	"fmt"
	"go/ast"
	"maps"
	"slices"
	"strings"
	"testing"
)

// mostExported is the number of exported declarations in public packages. Lower it when
// you remove some. Raise it only if users need the new ones.
const mostExported = 671

// withoutExample lists the public packages that have no example. The list may only
// shrink.
var withoutExample = []string{}

// public reports whether users can import the package of a file.
func public(f *file) bool {
	return f.syntax != nil && !f.nested && !f.isTest() && f.syntax.Name.Name != "main" &&
		!slices.Contains(strings.Split(f.dir(), "/"), "internal")
}

// exported counts the exported functions, types, constants and variables of a file,
// and the exported methods of its exported types.
func exported(f *file) (n int) {
	count := func(name *ast.Ident) {
		if name.IsExported() {
			n++
		}
	}
	for _, d := range f.syntax.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			if d.Recv == nil || ast.IsExported(receiver(d.Recv.List[0].Type)) {
				count(d.Name)
			}
		case *ast.GenDecl:
			for _, spec := range d.Specs {
				switch spec := spec.(type) {
				case *ast.TypeSpec:
					count(spec.Name)
				case *ast.ValueSpec:
					for _, name := range spec.Names {
						count(name)
					}
				}
			}
		}
	}
	return n
}

// receiver returns the name of the type in a method's receiver.
func receiver(t ast.Expr) string {
	switch t := t.(type) {
	case *ast.StarExpr:
		return receiver(t.X)
	case *ast.IndexExpr:
		return receiver(t.X)
	case *ast.IndexListExpr:
		return receiver(t.X)
	case *ast.Ident:
		return t.Name
	}
	return ""
}

// checkAPI counts the exported declarations of all public packages. It complains if
// there are more than most.
func checkAPI(files []*file, most int) (byPackage map[string]int, complaints []string) {
	byPackage = map[string]int{}
	total := 0
	for _, f := range files {
		if public(f) {
			n := exported(f)
			byPackage[f.dir()] += n
			total += n
		}
	}
	if total > most {
		complaints = append(complaints, fmt.Sprintf("public packages have %d exported declarations, more than %d; move what users do not need into internal, or raise mostExported in internal/lint/api_test.go", total, most))
	}
	return byPackage, complaints
}

// checkExamples wants an Example function in the tests of each public package that
// exports something. It complains about exceptions that are no longer needed.
func checkExamples(files []*file, exceptions []string) (complaints []string) {
	api, _ := checkAPI(files, 0)
	shown := map[string]bool{}
	for _, f := range files {
		if f.isTest() && f.syntax != nil && slices.ContainsFunc(f.syntax.Decls, isExample) {
			shown[f.dir()] = true
		}
	}
	for _, pkg := range slices.Sorted(maps.Keys(api)) {
		excepted := slices.Contains(exceptions, pkg)
		switch {
		case api[pkg] > 0 && !shown[pkg] && !excepted:
			complaints = append(complaints, fmt.Sprintf("package %s has no example; write an Example function in %s/example_test.go", pkg, pkg))
		case shown[pkg] && excepted:
			complaints = append(complaints, fmt.Sprintf("package %s has an example now; remove it from withoutExample in internal/lint/api_test.go", pkg))
		}
	}
	for _, pkg := range exceptions {
		if api[pkg] == 0 {
			complaints = append(complaints, fmt.Sprintf("package %s is not public or exports nothing; remove it from withoutExample in internal/lint/api_test.go", pkg))
		}
	}
	return complaints
}

func isExample(d ast.Decl) bool {
	fn, ok := d.(*ast.FuncDecl)
	return ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Example")
}

func TestAPI(t *testing.T) {
	byPackage, complaints := checkAPI(repo(t), mostExported)
	complain(t, complaints)
	total := 0
	for _, pkg := range slices.Sorted(maps.Keys(byPackage)) {
		t.Logf("%4d %s", byPackage[pkg], pkg)
		total += byPackage[pkg]
	}
	t.Logf("%4d exported declarations in %d public packages, of at most %d", total, len(byPackage), mostExported)
}

func TestExamples(t *testing.T) { complain(t, checkExamples(repo(t), withoutExample)) }

func TestAPIPlanted(t *testing.T) {
	files := []*file{
		parseGo(t, "p/a.go", "package p\n\nconst A, b = 1, 2\n\nvar C int\n\ntype D[T any] struct{}\n\nfunc (d *D[T]) E() {}\n\nfunc (d D[T]) f() {}\n\ntype g int\n\nfunc (g) H() {}\n\nfunc I() {}\n"), // A C D E I
		parseGo(t, "p/a_test.go", "package p\n\nfunc J() {}\n"),
		parseGo(t, "internal/q/a.go", "package q\n\nfunc K() {}\n"),
		parseGo(t, "p/internal/r/a.go", "package r\n\nfunc L() {}\n"),
		parseGo(t, "cmd/s/a.go", "package main\n\nfunc M() {}\n"),
	}
	byPackage, complaints := checkAPI(files, 5)
	mustComplain(t, complaints)
	if len(byPackage) != 1 || byPackage["p"] != 5 {
		t.Errorf("counted %v, want 5 in p", byPackage)
	}
	_, complaints = checkAPI(files, 4)
	mustComplain(t, complaints, "have 5 exported declarations, more than 4")
}

func TestExamplesPlanted(t *testing.T) {
	const source = "package p\n\nfunc F() {}\n"
	files := []*file{
		parseGo(t, "shown/a.go", source), parseGo(t, "shown/example_test.go", "package p_test\n\nfunc ExampleF() {}\n"),
		parseGo(t, "bare/a.go", source), parseGo(t, "bare/a_test.go", "package p\n\nfunc TestExample() {}\n"),
		parseGo(t, "excepted/a.go", source),
		parseGo(t, "empty/a.go", "package p\n"),
		parseGo(t, "internal/a.go", source),
	}
	mustComplain(t, checkExamples(files, []string{"excepted"}), "package bare has no example")
	mustComplain(t, checkExamples(files, []string{"bare", "excepted", "gone", "shown"}), "package shown has an example now", "package gone is not public")
}
