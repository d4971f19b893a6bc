// Command bridge is Stowage as a shared library for other languages; stowage.h documents
// its interface. Build it with
//
//	go build -buildmode=c-shared -o libstowage.so ./pytorch/bridge
//
// It is the one package that needs cgo: without cgo only this file is compiled. entry.c
// owns what happens before Go is entered, exports.go converts C's types to those of package
// session, which does the work.
package main

func main() {}
