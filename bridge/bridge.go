// Command bridge is Stowage as a shared library for other languages; stowage.h has its
// interface. It is built with
//
//	go build -buildmode=c-shared -o libstowage.so ./bridge
//
// and is the one part that needs cgo: without it this file alone is left. entry.c owns
// what happens before Go is entered, exports.go the way from C's types to package
// session's, which does the work.
package main

func main() {}
