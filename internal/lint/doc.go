// Package lint holds the rules of this repository as tests, so that `go test ./...`
// checks them. The rules are about imports, the size of files and functions, forbidden
// words, clocks, headers, compiled kernels, references to docs/SPEC.md, the size of the public
// API, and examples.
//
// Each rule is a function from files to complaints. One test runs it over the
// repository. Another test runs it over a planted violation, to prove that the rule
// can fail.
package lint
