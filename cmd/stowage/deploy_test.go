// This file owns the tests of the container and Kubernetes files in deploy/. There is no cluster: they
// read the manifests and run the commands with the environment that the operators would give, on
// this machine.

package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/stowage-dev/stowage/internal/launcher"
	"github.com/stowage-dev/stowage/internal/leak"
)

// manifest is a manifest in deploy/.
type manifest struct {
	t    *testing.T
	root any
}

func readManifest(t *testing.T, name string) manifest {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../deploy", name))
	if err != nil {
		t.Fatal(err)
	}
	m := manifest{t: t}
	if err := yaml.Unmarshal(text, &m.root); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return m
}

// at returns what lies at a path of keys and numbers: "spec.containers.0.image".
func (m manifest) at(path string) any {
	m.t.Helper()
	x := m.root
	for key := range strings.SplitSeq(path, ".") {
		switch v := x.(type) {
		case map[string]any:
			x = v[key]
		case []any:
			i := 0
			if _, err := fmt.Sscan(key, &i); err != nil || i >= len(v) {
				m.t.Fatalf("there is no %s in %s", key, path)
			}
			x = v[i]
		default:
			x = nil
		}
		if x == nil {
			m.t.Fatalf("there is no %s in %s", key, path)
		}
	}
	return x
}

func (m manifest) text(path string) string { return fmt.Sprint(m.at(path)) }

// environment returns the variables of a container.
func (m manifest) environment(container string) map[string]string {
	env := map[string]string{}
	list, _ := m.at(container + ".env").([]any)
	for i := range list {
		at := fmt.Sprintf("%s.env.%d.", container, i)
		env[m.text(at+"name")] = m.text(at + "value")
	}
	return env
}

// script returns what a container's shell runs, with fewer steps and in another folder. Its image is
// that of the Containerfile.
func (m manifest) script(container, dir string) string {
	m.t.Helper()
	built, err := os.ReadFile("../../deploy/Containerfile")
	if err != nil {
		m.t.Fatal(err)
	}
	if image := m.text(container + ".image"); !strings.Contains(string(built), " -t "+image+" ") {
		m.t.Errorf("nothing says how the image %s is built", image)
	}
	if got := m.text(container + ".command"); got != "[sh -c]" {
		m.t.Errorf("the command is %s", got)
	}
	if got, want := m.text(container+".volumeMounts.0.mountPath"), "/runs"; got != want {
		m.t.Errorf("runs are mounted at %s, want %s", got, want)
	}
	script := m.text(container + ".args.0")
	for old, now := range map[string]string{"/runs/stowage": dir, "--steps 300": "--plain --micro 1 --seq 32 --microbatches 2 --steps 2", "--save-every 50": "--save-every 1", "exec sleep infinity": "exit"} {
		if !strings.Contains(script, old) && old != "exec sleep infinity" {
			m.t.Errorf("the script has no %s", old)
		}
		script = strings.ReplaceAll(script, old, now)
	}
	return script
}

// shell runs a script in several processes, each with variables of its own, and returns what all
// of them print.
func shell(t *testing.T, script string, processes []map[string]string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := t.TempDir()
	for name, to := range map[string]string{"stowage": self, "mpirun": "/usr/bin/mpirun.openmpi"} {
		if err := os.Symlink(to, filepath.Join(bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	runtime.LockOSThread() // its end would be the end of the processes
	defer runtime.UnlockOSThread()
	var wg sync.WaitGroup
	outs := make([]bytes.Buffer, len(processes))
	for i, vars := range processes {
		cmd := exec.CommandContext(ctx, "sh", "-c", script)
		cmd.Env = append(os.Environ(), asProgram+"=1", "PATH="+bin+":"+os.Getenv("PATH"))
		for name, value := range vars {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
		cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = &outs[i], &outs[i], leak.Child(syscall.SIGKILL)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			if err := cmd.Wait(); err != nil {
				t.Errorf("process %d: %v\n%s", i, err, outs[i].String())
			}
		})
	}
	wg.Wait()
	all := ""
	for i := range outs {
		all += outs[i].String()
	}
	return all
}

// place returns what the launcher package makes of variables.
func placeOf(t *testing.T, vars map[string]string) *launcher.Place {
	t.Helper()
	p, err := launcher.Find(func(name string) string { return vars[name] })
	if err != nil || p == nil {
		t.Fatalf("%v: %v, %v", vars, p, err)
	}
	return p
}

// The commands of the manifests train in as many processes as there are ranks, started by what the
// operators set, and start again where they stopped. Without -full only those of a JobSet do. SPEC S7.1.
func TestDeployments(t *testing.T) {
	if testing.Short() {
		t.Skip("trains in four processes")
	}
	for _, program := range []string{"mpirun.openmpi", "mpiexec.hydra"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not installed", program)
		}
	}
	free := func() string {
		l, err := net.Listen("tcp", "127.0.0.1:0") // a number that is free
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		return fmt.Sprint(l.Addr().(*net.TCPAddr).Port)
	}
	const ranks = 4
	pods := func(vars func(rank int) map[string]string) (all []map[string]string) {
		port := free()
		for rank := range ranks {
			v := vars(rank)
			v["STOWAGE_PORT"] = port
			all = append(all, v)
		}
		return all
	}
	twice := func(t *testing.T, script, dir string, processes func() []map[string]string) {
		t.Helper()
		for _, want := range []string{"parameters ", "nothing to do: the run has finished"} {
			if out := shell(t, script, processes()); strings.Count(out, want) != 1 {
				t.Errorf("%s; want %q once", out, want)
			}
		}
		if digestOf(t, dir) == "" {
			t.Error("there are no parameters")
		}
	}
	t.Run("JobSet", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "run")
		m := readManifest(t, "jobset.yaml")
		const job = "spec.replicatedJobs.0"
		const container = job + ".template.spec.template.spec.containers.0"
		env := m.environment(container)
		pod := fmt.Sprintf("%s-%s-0-0.%s", m.text("metadata.name"), m.text(job+".name"), m.text("metadata.name"))
		if env["MASTER_ADDR"] != pod || env["WORLD_SIZE"] != m.text(job+".template.spec.completions") || env["WORLD_SIZE"] != m.text(job+".template.spec.parallelism") {
			t.Errorf("%v does not name %s and the number of pods", env, pod)
		}
		env["JOB_COMPLETION_INDEX"] = "3"
		if p := placeOf(t, env); p.Launcher != launcher.Job || p.Rank != 3 || p.Size != ranks || p.Leader != pod || p.Port != 29500 || !p.LocalKnown || p.LocalSize != 1 {
			t.Errorf("the place is %+v", p)
		}
		twice(t, m.script(container, dir), dir, func() []map[string]string {
			return pods(func(rank int) map[string]string {
				return map[string]string{"JOB_COMPLETION_INDEX": fmt.Sprint(rank), "WORLD_SIZE": env["WORLD_SIZE"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": env["MASTER_PORT"]}
			})
		})
	})
	t.Run("LeaderWorkerSet", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "run")
		m := readManifest(t, "leaderworkerset.yaml")
		vars := func(rank int) map[string]string {
			return map[string]string{"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": m.text("spec.leaderWorkerTemplate.size"), "LWS_WORKER_INDEX": fmt.Sprint(rank)}
		}
		if p := placeOf(t, vars(2)); p.Launcher != launcher.LeaderWorkerSet || p.Rank != 2 || p.Size != ranks || !p.LocalKnown {
			t.Errorf("the place is %+v", p)
		}
		if script := m.script("spec.leaderWorkerTemplate.workerTemplate.spec.containers.0", dir); *allCases {
			twice(t, script, dir, func() []map[string]string { return pods(vars) })
		}
	})
	t.Run("MPIJob", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "run")
		m := readManifest(t, "mpijob.yaml")
		slots, workers := m.text("spec.slotsPerWorker"), m.text("spec.mpiReplicaSpecs.Worker.replicas")
		if slots != "2" || workers != "2" {
			t.Errorf("%s workers have %s slots, want room for %d ranks", workers, slots, ranks)
		}
		script := m.script("spec.mpiReplicaSpecs.Launcher.template.spec.containers.0", dir)
		if !strings.Contains(script, fmt.Sprintf("mpirun -n %d ", ranks)) {
			t.Errorf("the script is %s", script)
		}
		if !*allCases {
			return
		}
		twice(t, script, dir, func() []map[string]string {
			return []map[string]string{{"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}}
		})
	})
}
