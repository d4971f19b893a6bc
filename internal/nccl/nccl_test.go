// This file owns the tests of the binding. A library in C, which the machine's compiler
// makes, says what it was called with.

package nccl

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/ebitengine/purego"
)

// stub is a library that has every function. It keeps what it is given, and its errors and
// versions are those that the environment names when it is loaded.
const stub = `
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef struct { unsigned char b[128]; } ID;
typedef struct { uint64_t size; uint32_t magic, version; int blocking, cluster, min, max; const char *net; int split; } Config;
static int state = 0;
static char last[256];
static int number(const char *name, int otherwise) { const char *v = getenv(name); return v ? atoi(v) : otherwise; }
int ncclGetVersion(int *v) { *v = number("STUB_VERSION", 22809); return 0; }
int ncclGetUniqueId(ID *id) { for (int i = 0; i < 128; i++) id->b[i] = i + 1; return 0; }
const char *ncclGetErrorString(int r) { return r == 6 ? "remote process exited" : "something else"; }
const char *ncclGetLastError(void *c) { return last; }
int ncclCommInitRankConfig(void **c, int n, ID id, int rank, Config *cfg) {
  for (int i = 0; i < 128; i++) if (id.b[i] != i + 1) return 4;
  if (n != 7 || rank != 3 || cfg->size != 48 || cfg->magic != 0xcafebeef || cfg->blocking != 0 || cfg->min != -2147483647 - 1 || cfg->net) return 5;
  *c = (void *)0x1234; state = 7; return 7;
}
int ncclCommGetAsyncError(void *c, int *s) { *s = state; if (state == 7) state = 0; return c == (void *)0x1234 ? 0 : 4; }
int ncclCommFinalize(void *c) { return 0; }
int ncclCommDestroy(void *c) { return 0; }
int ncclCommAbort(void *c) { strcpy(last, "the link\n broke"); state = 6; return 0; }
int ncclGroupStart(void) { return number("NCCL_GRAPH_REGISTER", 1); }
int ncclCommRegister(void *c, void *a, size_t n, void **h) { *h = (void *)77; return c == (void *)0x1234 && a == (void *)16 && n == 1ul << 33 ? 0 : 4; }
int ncclCommDeregister(void *c, void *h) { return c == (void *)0x1234 && h == (void *)77 ? 0 : 4; }
int ncclGroupEnd(void) { return 7; }
int ncclSend(const void *a, size_t n, int t, int peer, void *c, void *s) { return a == (void *)16 && n == 1ul << 33 && t == 1 && peer == 5 && s == (void *)9 ? 0 : 4; }
int ncclRecv(void *a, size_t n, int t, int peer, void *c, void *s) { return ncclSend(a, n, t, peer, c, s); }
int ncclAllGather(const void *a, void *b, size_t n, int t, void *c, void *s) { return a == (void *)16 && b == (void *)32 && n == 8 && t == 1 && s == (void *)9 ? 0 : 4; }
int ncclReduceScatter(const void *a, void *b, size_t n, int t, int op, void *c, void *s) { return a == (void *)16 && b == (void *)32 && n == 8 && t == 9 && op == 4 && s == (void *)9 ? 0 : 4; }
int ncclAllReduce(const void *a, void *b, size_t n, int t, int op, void *c, void *s) { return a == (void *)16 && b == (void *)32 && n == 8 && t == 7 && op == 2 && s == (void *)9 ? 0 : 4; }
int ncclBroadcast(const void *a, void *b, size_t n, int t, int root, void *c, void *s) { return a == b && a == (void *)16 && n == 8 && t == 1 && root == 2 && s == (void *)9 ? 0 : 4; }
`

// build makes the library and returns its file.
func build(t *testing.T, source string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil || runtime.GOOS != "linux" {
		t.Skip("the machine has no C compiler (cc) to make a library with")
	}
	c, so := filepath.Join(t.TempDir(), "stub.c"), filepath.Join(t.TempDir(), "libnccl.so.2")
	if err := os.WriteFile(c, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-w", "-shared", "-fPIC", "-o", so, c).CombinedOutput(); err != nil {
		t.Skipf("the C compiler makes no library: %v: %s", err, out)
	}
	return so
}

// Every call has the arguments that NCCL's header names, and errors have its words.
func TestCalls(t *testing.T) {
	so := build(t, stub)
	if err := RegisterNoGraphs(); err != nil { // which GroupStart of the stub asks for
		t.Fatal(err)
	}
	l, err := Open(func(name string) string { return map[string]string{Variable: so}[name] })
	if err != nil {
		t.Fatal(err)
	}
	if l.Version != 22809 || l.Name != so {
		t.Errorf("opened version %d of %s", l.Version, l.Name)
	}
	id, err := l.NewID()
	if err != nil || id[0] != 1 || id[127] != 128 {
		t.Errorf("the ID is %v, %v", id, err)
	}
	c, err := l.Init(7, id, 3)
	if err != nil || c != 0x1234 {
		t.Fatalf("Init returns %#x, %v", c, err)
	}
	for _, want := range []bool{false, true} {
		if done, err := l.Poll(c); done != want || err != nil {
			t.Errorf("Poll returns %v, %v", done, err)
		}
	}
	for name, err := range map[string]error{
		"GroupStart": l.GroupStart(), "Send": l.Send(c, 16, 1<<33, 5, 9), "Recv": l.Recv(c, 16, 1<<33, 5, 9),
		"AllGather": l.AllGather(c, 32, 16, 8, 9), "ReduceScatter": l.ReduceScatter(c, 32, 16, 8, BFloat16, Mean, 9),
		"AllReduce": l.AllReduce(c, 32, 16, 8, Float32, Max, 9), "Broadcast": l.Broadcast(c, 16, 8, 2, 9),
		"GroupEnd": l.GroupEnd(), "Finalize": l.Finalize(c), "Destroy": l.Destroy(c), "Abort": l.Abort(c),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if h, err := l.Register(c, 16, 1<<33); h != 77 || err != nil || l.Deregister(c, h) != nil || l.Deregister(c, h+1) == nil {
		t.Errorf("Register returns %d, %v", h, err)
	}
	for _, lacks := range newer { // as before 2.19
		at := l.procs[lacks]
		l.procs[lacks] = 0
		if h, err := l.Register(c, 16, 1<<33); h != 0 || err != nil {
			t.Errorf("a library without %s registers %d, %v", lacks, h, err)
		}
		l.procs[lacks] = at
	}
	if done, err := l.Poll(c + 1); done || err == nil || !strings.HasPrefix(err.Error(), "nccl: ncclCommGetAsyncError: something else") {
		t.Errorf("Poll of no communicator returns %v, %v", done, err)
	}
	if !l.mu.TryLock() {
		t.Error("a lock is held after all calls")
	}
	if done, err := l.Poll(c); done || err == nil || err.Error() != "nccl: a communicator: remote process exited (the link broke)" {
		t.Errorf("Poll returns %v, %v", done, err)
	}
}

// The process's environment changes in one place, and keeps what was set.
func TestRegisterNoGraphs(t *testing.T) {
	t.Setenv(graphRegister, "1")
	if err := RegisterNoGraphs(); err != nil || os.Getenv(graphRegister) != "1" {
		t.Errorf("%s is %q, %v", graphRegister, os.Getenv(graphRegister), err)
	}
	if err := os.Unsetenv(graphRegister); err != nil { // until the test ends
		t.Fatal(err)
	}
	_, _ = Open(func(string) string { return "libnothing.so.1" })
	if v, set := os.LookupEnv(graphRegister); set {
		t.Errorf("Open sets %s to %q", graphRegister, v)
	}
	if err := RegisterNoGraphs(); err != nil || os.Getenv(graphRegister) != "0" {
		t.Errorf("%s is %q, %v", graphRegister, os.Getenv(graphRegister), err)
	}
}

// A library that is too old, or not NCCL, is refused in words.
func TestRefused(t *testing.T) {
	if _, err := open([]string{build(t, strings.Replace(stub, "22809", "21800", 1))}); err != nil {
		t.Errorf("the oldest version that is enough: %v", err)
	}
	so := build(t, "int ncclGetVersion(int *v) { *v = 21403; return 0; }")
	for name, words := range map[string]string{
		so:                "is version 2.14.3; install 2.18.0 or later",
		"libnothing.so.1": "no NCCL library was found",
		"libc.so.6":       "libc.so.6 has no function ncclGetVersion",
		build(t, "int ncclGetVersion(int *v) { *v = 22809; return 0; }"): "has no function ncclGetUniqueId",
	} {
		if _, err := open([]string{name}); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The libraries of Python packages and toolkits are found behind those of the loader, in the
// order of the variables and the newest Python first; STOWAGE_NCCL names one alone.
func TestNames(t *testing.T) {
	root := t.TempDir()
	var want []string
	for _, folder := range []string{
		"venv/lib", "venv/lib/python3.12/site-packages/nvidia/nccl/lib", "venv/lib/python3.11/site-packages/nvidia/nccl/lib",
		"conda/lib", "conda/lib/python3.9/dist-packages/nvidia/nccl/lib", "home/.local/lib/python3.12/site-packages/nvidia/nccl/lib", "cuda-a/lib64", "cuda-b/lib64",
	} {
		file := filepath.Join(root, folder, "libnccl.so.2")
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		want = append(want, file)
	}
	env := map[string]string{"HOME": root + "/home", "VIRTUAL_ENV": root + "/venv", "CONDA_PREFIX": root + "/conda", "CUDA_HOME": root + "/cuda-a", "CUDA_PATH": root + "/cuda-b"}
	look := func() []string {
		return slices.DeleteFunc(Names(func(name string) string { return env[name] }), func(name string) bool { return filepath.IsAbs(name) && !strings.HasPrefix(name, root) })
	}
	if got := look(); !slices.Equal(got, append(slices.Clone(files), want...)) {
		t.Errorf("looks for %v, want %v", got, want)
	}
	t.Chdir(root) // paths that depend on where a program is started are none
	env = map[string]string{"VIRTUAL_ENV": "venv", "CONDA_PREFIX": "conda", "HOME": "home"}
	if got := look(); !slices.Equal(got, files) {
		t.Errorf("looks for %v", got)
	}
	t.Chdir(filepath.Join(root, "cuda-a")) // nor is a toolkit that no variable names
	if got := look(); !slices.Equal(got, files) {
		t.Errorf("looks for %v", got)
	}
	env[Variable] = "/opt/libnccl.so"
	if names := Names(func(name string) string { return env[name] }); len(names) != 1 || names[0] != "/opt/libnccl.so" {
		t.Errorf("looks for %v", names)
	}
}

// Of libraries that cannot be opened, the error is of the first that is there, or else of the first.
func TestFirstError(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "libnccl.so.2")
	if err := os.WriteFile(broken, []byte("no library at all, whatever its name says of it, and long enough to have a header"), 0o700); err != nil {
		t.Fatal(err)
	}
	for want, names := range map[string][]string{"libnothing.so.1": {"libnothing.so.1", "libnothing.so.2"}, broken: {"libnothing.so.1", broken, "libnothing.so.2"}} {
		if _, err := open(names); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %s", names, err, want)
		}
	}
}

func TestWords(t *testing.T) {
	for version, want := range map[int]string{22809: "2.28.9", 21800: "2.18.0", 2804: "2.8.4", 9999: "9.9.99", 10000: "1.0.0"} {
		if got := Words(version); got != want {
			t.Errorf("%d is %s, want %s", version, got, want)
		}
	}
}

// Every function that fails is named in the error of its call, with what the library says.
func TestEveryCallFails(t *testing.T) {
	l, err := open([]string{build(t, stub)})
	if err != nil {
		t.Fatal(err)
	}
	no := purego.NewCallback(func() uintptr { return 6 })
	for name, call := range map[string]func() error{
		"ncclGetUniqueId": func() error { _, err := l.NewID(); return err }, "ncclCommGetAsyncError": func() error { _, err := l.Poll(1); return err },
		"ncclCommFinalize": func() error { return l.Finalize(1) }, "ncclCommDestroy": func() error { return l.Destroy(1) }, "ncclCommAbort": func() error { return l.Abort(1) },
		"ncclCommRegister": func() error { _, err := l.Register(1, 2, 3); return err }, "ncclCommDeregister": func() error { return l.Deregister(1, 2) },
		"ncclGroupStart": l.GroupStart, "ncclGroupEnd": l.GroupEnd, "ncclSend": func() error { return l.Send(1, 2, 3, 4, 5) }, "ncclRecv": func() error { return l.Recv(1, 2, 3, 4, 5) },
		"ncclAllGather": func() error { return l.AllGather(1, 2, 3, 4, 5) }, "ncclReduceScatter": func() error { return l.ReduceScatter(1, 2, 3, 4, 5, 6, 7) },
		"ncclAllReduce": func() error { return l.AllReduce(1, 2, 3, 4, 5, 6, 7) }, "ncclBroadcast": func() error { return l.Broadcast(1, 2, 3, 4, 5) },
	} {
		at := l.procs[name]
		l.procs[name] = no
		if err := call(); err == nil || err.Error() != "nccl: "+name+": remote process exited" {
			t.Errorf("%s: %v", name, err)
		}
		l.procs[name] = at
	}
	if _, err := l.Init(7, ID{}, 3); err == nil || err.Error() != "nccl: ncclCommInitRankConfig: something else" {
		t.Error(err)
	}
	if n := len(l.cells); n != 1 {
		t.Errorf("%d cells are kept for communicators", n)
	}
	at := l.procs["ncclGetLastError"]
	l.procs["ncclGetLastError"] = purego.NewCallback(func() uintptr { return 0 })
	if err := l.check("x", 0, 5); err == nil || err.Error() != "nccl: x: something else" {
		t.Error(err)
	}
	l.procs["ncclGetLastError"] = at
}
