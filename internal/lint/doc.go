// Package lint holds the rules of this repository as tests, so that `go test
// ./...` is all one has to run: which package may import which, the size of
// files and functions, words that do not belong here, headers, kernels beside
// their compiled form, and references to the specification.
//
// Each rule is a function from files to complaints. One test runs it over the
// repository, another over a planted violation, so that no rule can go blind.
package lint
