package live

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestConnections(t *testing.T) {
	for files, want := range map[uint64]int{0: 128, 8: 4, 64: 16, 256: 64, 512: 128, 1 << 20: 128, 1<<64 - 1: 128} {
		if got := connections(files); got != want {
			t.Errorf("%d files: %d connections", files, got)
		}
	}
}

// few is what the process in TestFlood may open, and what its run needs.
const few, needed = 256, 150

// flooded serves a run in a process with few files. It opens what its run needs whenever
// it is told to, and says whether it could.
func flooded() error {
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: few, Max: few}); err != nil {
		return err
	}
	s, err := Listen(":0", "")
	if err != nil {
		return err
	}
	s.farewell = 0
	defer s.Close()
	fmt.Println(s.URL())
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		for i := range needed {
			f, err := os.Create(filepath.Join(in.Text(), fmt.Sprint(i)))
			if err != nil {
				return err
			}
			defer f.Close()
		}
		fmt.Println("saved")
	}
	return nil
}

// 400 connections that ask for nothing do not take the files of a run that may open 256,
// and other viewers still get an answer.
func TestFlood(t *testing.T) {
	if os.Getenv("STOWAGE_FLOODED") != "" {
		if err := flooded(); err != nil {
			fmt.Println(err)
		}
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestFlood$")
	cmd.Env = append(os.Environ(), "STOWAGE_FLOODED=1")
	cmd.Stderr = os.Stderr
	to, err1 := cmd.StdinPipe()
	from, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer to.Close()
	said := bufio.NewScanner(from)
	said.Scan()
	url := said.Text()
	host := strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/")
	for range 400 {
		c, err := net.Dial("tcp", host)
		if err != nil {
			t.Fatalf("%s: %v", host, err)
		}
		defer c.Close()
	}
	if status, _, _ := get(t, &http.Client{}, url+"metrics"); status != http.StatusOK {
		t.Errorf("a viewer got %d", status)
	}
	if _, err := fmt.Fprintln(to, t.TempDir()); err != nil {
		t.Fatal(err)
	}
	if said.Scan(); said.Text() != "saved" {
		t.Errorf("the run said %q", said.Text())
	}
}
