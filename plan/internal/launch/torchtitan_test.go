package launch

import (
	"strings"
	"testing"
)

const titanStart = "[model]\nname = \"llama3\"\nflavor = \"8B\"\n[training]\nseq_len = 2048\n"

func TestWrongTitan(t *testing.T) {
	var list []wrong
	for _, c := range []struct {
		more    string
		refused bool
		words   []string
	}{
		{"[parallelism]\ntensor_parallel_degree = 0", false, []string{"parallelism.tensor_parallel_degree is 0"}},
		{"[parallelism]\ntensor_parallel_degree = \"two\"", false, []string{"tensor_parallel_degree"}},
		{"[parallelism]\ndata_parallel_shard_degree = 0", false, []string{"parallelism.data_parallel_shard_degree is 0", "-1"}},
		{"global_batch_size = 0", false, []string{"training.global_batch_size is 0", "-1"}},
		{"[parallelism]\ndata_parallel_shard_degree = 1", true, []string{"data_parallel_shard_degree"}},
		{"[parallelism]\ndata_parallel_shard_degree = 1000000\ntensor_parallel_degree = 1000000", false, []string{"GPUs"}},
		{"[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = \"ZBVZeroBubble\"", true, []string{"ZBVZeroBubble", "1F1B"}},
		{"[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_split_points = [\"layers.4\"]", true, []string{"pipeline_parallel_split_points"}},
		{"[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 3", false, []string{"local_batch_size is 8", "microbatch_size"}},
		{"enable_cpu_offload = true", true, []string{"training.enable_cpu_offload"}},
		{"dtype = \"bfloat16\"", true, []string{"training.dtype"}},
		{"[activation_checkpoint]\nmode = \"memory_budget\"", true, []string{"memory_budget"}},
		{"[activation_checkpoint]\nmode = \"some\"", false, []string{"activation_checkpoint.mode", "selective"}},
		{"[activation_checkpoint]\nmode = \"selective\"\nselective_ac_option = \"all\"", false, []string{"selective_ac_option"}},
		{"[optimizer]\nname = \"Shampoo\"", true, []string{"Shampoo"}},
		{"[optimizer]\nearly_step_in_backward = true", true, []string{"early_step_in_backward"}},
		{"seq_len = 4096", false, []string{"line 6", "seq_len", "twice"}},
		{"[training", false, []string{"line 6", "bracket"}},
		{"steps = ", false, []string{"line 6", "a value"}},
		{"steps = 1 2", false, []string{"line 6", "new line"}},
		{"dataset = \"c4", false, []string{"line 6", "string that ends"}},
		{"dataset = [1, 2", false, []string{"the end of the file"}},
	} {
		list = append(list, wrong{titanStart + c.more, c.refused, c.words})
	}
	list = append(list,
		wrong{strings.Replace(titanStart, "llama3", "flux", 1), true, []string{"flux", "llama3"}},
		wrong{strings.Replace(titanStart, "8B", "9B", 1), true, []string{"9B", "70B"}},
	)
	checkWrong(t, list)
}

// Every flavor is a sound model, and those of published sizes have the published number of
// parameters.
func TestTitanFlavors(t *testing.T) {
	want := map[string]int64{
		"llama3 8B": 8030261248, "llama3 1B": 1235814400, "llama3 3B": 3212749824, "qwen3 0.6B": 596049920, "qwen3 1.7B": 1720574976,
		"qwen3 8B": 8190735360, "qwen3 14B": 14768307200, "llama4 17bx16e_irope": 107769861120, "llama4 17bx128e_irope": 400711848960,
		"deepseek_v3 671B": 671026404352, // and 14848 numbers that balance experts
	}
	for name, flavors := range titanModels {
		for flavor := range flavors {
			f, err := Parse([]byte("[model]\nname = \""+name+"\"\nflavor = \""+flavor+"\"\n[training]\n"), nil)
			if err != nil {
				t.Errorf("%s %s: %v", name, flavor, err)
				continue
			}
			if n := want[f.Model.Name]; n > 0 && f.Model.Parameters() != n {
				t.Errorf("%s has %d parameters, want %d", f.Model.Name, f.Model.Parameters(), n)
			}
			delete(want, f.Model.Name)
		}
	}
	if len(want) > 0 {
		t.Errorf("flavors are missing: %v", want)
	}
}

// A key that is not known is named, in every table.
func TestTitanNotes(t *testing.T) {
	f, err := Parse([]byte(titanStart+"novel_a = 1\n[optimizer]\nstate_dtype = \"bfloat16\"\n[parallelism]\nnovel_b = 1\n[activation_checkpoint]\nnovel_c = 1\n"), nil)
	if err != nil {
		t.Fatal(err)
	}
	notes := strings.Join(f.Notes, "\n")
	for _, key := range []string{"training.novel_a", "optimizer.state_dtype", "parallelism.novel_b", "activation_checkpoint.novel_c"} {
		if !strings.Contains(notes, key) {
			t.Errorf("%s is not named in %s", key, notes)
		}
	}
}

// Parameters stay gathered between the passes if the file says so, or if it leaves that open and there is a pipeline.
func TestTitanReshards(t *testing.T) {
	for rest, want := range map[string]string{
		"": "optim_grads_params", `fsdp_reshard_after_forward = "never"`: "optim_grads", `fsdp_reshard_after_forward = "always"`: "optim_grads_params",
		"pipeline_parallel_degree = 2": "optim_grads", "pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = \"default\"": "optim_grads",
		"pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = \"always\"": "optim_grads_params",
	} {
		f, err := Parse([]byte(titanStart+"[parallelism]\n"+rest+"\n"), nil)
		if err != nil || f.Args["data-parallel-sharding-strategy"] != want {
			t.Errorf("%q: %v, %v, want %s", rest, f, err, want)
		}
	}
}

// Every second layer is recomputed, also if the file leaves the number to torchtitan.
func TestTitanEveryLayer(t *testing.T) {
	for _, rest := range []string{"[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = '2'", "[activation_checkpoint]\nmode = 'selective'", ""} {
		f, err := Parse([]byte(titanStart+"[parallelism]\npipeline_parallel_degree = 2\n"+rest), nil)
		if err != nil || f.Args["recompute-method"] != "block" || f.Args["recompute-num-layers"] != 8 || f.Accumulation != 8 {
			t.Errorf("%q: %+v, %v", rest, f, err)
		}
	}
}
