package rendezvous

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/internal/launcher"
)

func TestProcessMapping(t *testing.T) {
	for hosts, want := range map[string]string{
		"a":           "(vector,(0,1,1))",
		"a a":         "(vector,(0,1,2))",
		"a b":         "(vector,(0,2,1))",
		"a a b b c":   "(vector,(0,2,2),(2,1,1))",
		"a b a b":     "(vector,(0,2,1),(0,2,1))",
		"a a b c c a": "(vector,(0,1,2),(1,1,1),(2,1,2),(0,1,1))",
	} {
		if got := processMapping(strings.Fields(hosts)); got != want {
			t.Errorf("%s: %s, want %s", hosts, got, want)
		}
	}
}

// The answers are those that MPICH's client reads.
func TestPMI(t *testing.T) {
	sessions := joined(t, 2, nil)
	each(t, sessions, func(rank int, s *Session) error {
		p, err := s.ServePMI()
		if err != nil {
			return err
		}
		defer p.Close()
		end := os.NewFile(uintptr(p.theirs), "library")
		defer end.Close()
		in := bufio.NewScanner(end)
		for _, c := range [][2]string{
			{"cmd=init pmi_version=1 pmi_subversion=1", "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1"},
			{"cmd=get_maxes", "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=512"},
			{"cmd=get_appnum", "cmd=appnum rc=0 appnum=0"},
			{"cmd=get_universe_size", "cmd=universe_size rc=0 size=2"},
			{"cmd=get_my_kvsname", "cmd=my_kvsname rc=0 kvsname=stowage"},
			{"cmd=get kvsname=stowage key=PMI_process_mapping", "cmd=get_result rc=0 msg=success value=(vector,(0,1,2))"},
			{fmt.Sprintf("cmd=put kvsname=stowage key=card%d value=a=%d#b", rank, rank), "cmd=put_result rc=0 msg=success"},
			{"cmd=barrier_in", "cmd=barrier_out rc=0"},
			{fmt.Sprintf("cmd=get kvsname=stowage key=card%d", 1-rank), fmt.Sprintf("cmd=get_result rc=0 msg=success value=a=%d#b", 1-rank)},
			{"cmd=get kvsname=stowage key=nobody", "cmd=get_result rc=-1 msg=key_not_found value=unknown"},
			{"cmd=publish_name service=x", "cmd=publish_name_result rc=-1 msg=unknown_command"},
			{"cmd=finalize", "cmd=finalize_ack rc=0"},
		} {
			fmt.Fprintln(end, c[0])
			if !in.Scan() || in.Text() != c[1] {
				return fmt.Errorf("%s: got %q, want %q", c[0], in.Text(), c[1])
			}
		}
		return nil
	})
	closeAll(t, sessions)
}

func FuzzParsePMI(f *testing.F) {
	f.Add("cmd=put kvsname=stowage key=card value=a=b#c")
	f.Add("mcmd=spawn")
	f.Fuzz(func(t *testing.T, line string) {
		for k, v := range parsePMI(line) {
			if !strings.Contains(line, k+"="+v) {
				t.Errorf("%q: %q is not in it", line, k+"="+v)
			}
		}
	})
}

// MPICH's library, and how it names the world, an integer and a sum.
const (
	mpichLibrary = "libmpich.so.12"
	mpichWorld   = 0x44000000
	mpichInt     = 0x4c000405
	mpichSum     = 0x58000003
)

// runMPICH is a rank that MPICH's mpirun did not start: it initialises MPICH and adds up the
// ranks.
func runMPICH() error {
	runtime.LockOSThread()
	place, err := launcher.Find(os.Getenv)
	if err != nil {
		return err
	}
	s, err := Join(context.Background(), place, Options{Patience: time.Minute})
	if err != nil {
		return err
	}
	p, err := s.ServePMI()
	if err != nil {
		return err
	}
	for name, value := range p.Environment() {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	lib, err := purego.Dlopen(mpichLibrary, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return err
	}
	var initMPI func(argc, argv *byte) int32
	var finalize func() int32
	var rankOf, sizeOf func(comm uintptr, n *int32) int32
	var allreduce func(send, recv *int32, count int32, kind, op, comm uintptr) int32
	purego.RegisterLibFunc(&initMPI, lib, "MPI_Init")
	purego.RegisterLibFunc(&finalize, lib, "MPI_Finalize")
	purego.RegisterLibFunc(&rankOf, lib, "MPI_Comm_rank")
	purego.RegisterLibFunc(&sizeOf, lib, "MPI_Comm_size")
	purego.RegisterLibFunc(&allreduce, lib, "MPI_Allreduce")
	var rank, size, sum int32
	one := int32(place.Rank + 1)
	if rc := initMPI(nil, nil); rc != 0 {
		return fmt.Errorf("MPI_Init: %d", rc)
	}
	rankOf(mpichWorld, &rank)
	sizeOf(mpichWorld, &size)
	if rc := allreduce(&one, &sum, 1, mpichInt, mpichSum, mpichWorld); rc != 0 {
		return fmt.Errorf("MPI_Allreduce: %d", rc)
	}
	fmt.Printf("rank %d of %d: %d\n", rank, size, sum)
	if rc := finalize(); rc != 0 {
		return fmt.Errorf("MPI_Finalize: %d", rc)
	}
	return errors.Join(p.Close(), s.Close())
}

// MPICH makes a world of processes that its mpirun did not start.
func TestMPICH(t *testing.T) {
	if _, err := purego.Dlopen(mpichLibrary, purego.RTLD_LAZY); err != nil {
		t.Skip("there is no MPICH: ", err)
	}
	for _, size := range []int{2, 4} {
		t.Run(fmt.Sprint(size, " processes"), func(t *testing.T) {
			for rank, p := range start(t, "mpich", size, "UCX_ERROR_SIGNALS=") {
				p.expect(t, fmt.Sprintf("rank %d of %d: %d", rank, size, size*(size+1)/2))
				for line := range p.lines {
					t.Errorf("rank %d: %s", rank, line)
				}
				if err := p.Wait(); err != nil {
					t.Errorf("rank %d: %v", rank, err)
				}
			}
		})
	}
}
